from __future__ import annotations

import numpy as np
import pytest
import torch

from eagleray.kernels.ranking import Ranking
from eagleray.messages.outputs import TokenLogprobs
from eagleray.messages.sampling import Sampling
from eagleray.worker import logprobs as module
from eagleray.worker.logprobs import score_prompt
from eagleray.worker.sampler import HostSampler, Sampled
from eagleray.worker.sampling_state import SamplingState


def sample(logits: torch.Tensor, samplings: list[Sampling], generated: tuple[int, ...] = ()) -> Sampled:
    state = SamplingState(num_rows=len(samplings), vocab_size=logits.shape[1], device=torch.device("cpu"))
    order = list(range(len(samplings)))
    for row in reversed(order):
        state.add_row(row, samplings[row], [0, *generated], 1)
    return HostSampler(state, Ranking()).sample(
        logits.clone(), np.array(order), np.full(len(order), 1 + len(generated))
    )


def ranked(logits: torch.Tensor) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token].item(), token))


def check(report: TokenLogprobs, logits: torch.Tensor, chosen: int, top: int, requested: tuple[int, ...] = ()) -> None:
    expected = torch.log_softmax(logits.double(), -1)
    assert report.token_ids == [chosen, *ranked(logits)[:top], *requested]
    assert report.logprobs == pytest.approx(expected[report.token_ids].tolist(), abs=1e-5)
    assert report.rank == 1 + int((logits > logits[chosen]).sum())


@pytest.mark.parametrize("vocab_size", [5, 200])
def test_sample_logprobs_reports_each_rows_request(vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, vocab_size) * 3
    samplings = [
        Sampling(seed=0, logprobs=0),
        Sampling(seed=1),
        Sampling(seed=2, logprobs=5),
        Sampling(seed=3, logprob_token_ids=(4, 0, 4)),
        Sampling(seed=4, temperature=0.0, logprobs=2, logprob_token_ids=(1,)),
        Sampling(seed=5, temperature=3.0, logprobs=3, logprob_token_ids=(3, 2)),
    ]
    sampled = sample(logits, samplings)
    assert sorted(sampled.logprobs) == [0, 2, 3, 4, 5]
    for row, report in sampled.logprobs.items():
        own = samplings[row]
        check(report, logits[row], sampled.token_ids[row], own.logprobs or 0, own.logprob_token_ids)


def test_sample_logprobs_are_raw_whatever_adjusts_the_choice() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 30)
    changed = Sampling(
        seed=7,
        temperature=0.5,
        top_k=3,
        logit_bias={11: 60.0},
        allowed_token_ids=(10, 11),
        repetition_penalty=1.5,
        presence_penalty=1.0,
        bad_words=((10,),),
        min_tokens=9,
        suppressed_token_ids=(3,),
        logprobs=4,
    )
    sampled = sample(logits, [changed, Sampling(seed=0, temperature=0.0)], generated=(5, 6))
    assert sampled.token_ids == [11, int(logits[1].argmax())]
    assert sorted(sampled.logprobs) == [0]
    check(sampled.logprobs[0], logits[0], 11, 4)


def test_sample_logprobs_equal_logits_share_rank_in_order_of_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 2.0, 2.0, 1.0]])
    for top in range(6):
        report = sample(logits, [Sampling(seed=0, allowed_token_ids=(4,), logprobs=top)]).logprobs[0]
        assert report.token_ids == [4, *[1, 3, 4, 0, 5, 2][:top]]
        assert report.rank == 1


def test_sample_logprobs_small_vocabulary_reports_fewer() -> None:
    samplings = [
        Sampling(seed=0, temperature=0.0, logprobs=20, logprob_token_ids=requested) for requested in ((2,), ())
    ]
    reports = sample(torch.tensor([[0.0, 2.0, 1.0]] * 2), samplings).logprobs
    assert [reports[row].token_ids for row in (0, 1)] == [[1, 1, 2, 0, 2], [1, 1, 2, 0]]


def test_sample_logprobs_are_equal_alone_and_in_a_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(9, 4001) * 4
    samplings = [Sampling(seed=row, logprobs=row % 4, logprob_token_ids=tuple(range(row % 3))) for row in range(9)]
    together = sample(logits, samplings).logprobs
    for row, sampling in enumerate(samplings):
        assert sample(logits[row : row + 1], [sampling]).logprobs[0] == together[row]


@pytest.mark.parametrize("k", [0, 1, 7])
def test_score_prompt_equal_log_softmax(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": 1000})
    torch.manual_seed(3)
    logits = torch.randn(23, 300) * 3
    tokens = torch.randint(0, 300, (23,))
    token_ids, logprobs, ranks = score_prompt(logits, tokens[:, None], k, Ranking())
    assert (token_ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    assert token_ids.shape == logprobs.shape == (23, 1 + k)
    expected = torch.log_softmax(logits, -1)
    assert token_ids[:, 0].tolist() == tokens.tolist()
    assert token_ids[:, 1:].tolist() == logits.topk(k).indices.tolist()
    torch.testing.assert_close(logprobs, expected.gather(1, token_ids.long()), atol=1e-6, rtol=0)
    assert ranks.tolist() == [1 + int((line > line[token]).sum()) for line, token in zip(logits, tokens, strict=True)]


def test_score_prompt_nan_logits_give_nan() -> None:
    token_ids, logprobs, _ = score_prompt(torch.full((2, 10), torch.nan), torch.tensor([[1], [2]]), 3, Ranking())
    assert token_ids.tolist() == [[1, 0, 1, 2], [2, 0, 1, 2]]
    assert logprobs.isnan().all()
