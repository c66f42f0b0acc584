"""The sampler on a GPU, with a vocabulary of real size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_grammars import grammar_rows, random_grammar
from sampler_launch import launch

from eagleray.kernels.ranking import Ranking
from eagleray.messages.sampling import Sampling
from eagleray.worker.logprobs import ScoreKind
from eagleray.worker.sampler import HostSampler
from eagleray.worker.sampling_state import SamplingState

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB_SIZE, NUM_ROWS, PROMPT = 151_936, 64, [11, 12, 13]
SAMPLINGS = [
    Sampling(seed=0, temperature=0.0),
    Sampling(seed=1),
    Sampling(seed=2, temperature=0.7, top_p=0.9),
    Sampling(seed=3, top_k=50),
    Sampling(seed=4, temperature=1.5, top_k=20_000, top_p=0.8, min_p=1e-4),
    Sampling(seed=5, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
    Sampling(seed=6, allowed_token_ids=tuple(range(0, VOCAB_SIZE, 7)), logit_bias={7: 3.0, 8: 90.0}, logprobs=5),
    Sampling(seed=7, temperature=0.0, bad_words=tuple((token,) for token in range(200)), logprobs=2),
    Sampling(seed=9, temperature=0.7, top_p=0.9, grammar=random_grammar("a"), logprobs=2),
    Sampling(seed=8, temperature=0.7, top_k=1000, top_p=0.9, min_p=1e-4, logprobs=4),
]


@pytest.mark.parametrize("kind", [ScoreKind(), ScoreKind(is_processed=True), ScoreKind(True, is_logits=True)])
def test_device_sampler_on_gpu_equals_cpu_sampler_without_waiting(kind: ScoreKind) -> None:
    from eagleray.worker.device_sampler import DeviceSampler

    state = SamplingState(num_rows=NUM_ROWS, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    host = HostSampler(state, Ranking(), kind, grammar_rows(VOCAB_SIZE))
    sampler = DeviceSampler(
        num_rows=NUM_ROWS,
        vocab_size=VOCAB_SIZE,
        device=torch.device("cuda"),
        reported_kind=kind,
        grammars=grammar_rows(VOCAB_SIZE, num_threads=4),
    )
    for row in range(NUM_ROWS):
        for each in (host, sampler):
            each.add_row(row, SAMPLINGS[row % len(SAMPLINGS)], PROMPT, len(PROMPT))
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for index, num_rows in enumerate([NUM_ROWS, 1, 7, NUM_ROWS, 32, NUM_ROWS]):
        rows = rng.permutation(NUM_ROWS)[:num_rows]
        positions = np.full(num_rows, len(PROMPT) + index)
        logits = torch.randn((num_rows, VOCAB_SIZE), generator=generator) * 3
        logits[num_rows // 2, 5] = torch.nan if index == 3 else 0.0
        on_gpu = logits.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if index >= 3 else "default")  # the first steps compile
        try:
            step = launch(sampler, on_gpu, rows, positions)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        sampled = step.finish([tensor.cpu().numpy() for tensor in step.tensors])
        expected = launch(host, logits, rows, positions).finish([])
        assert (sampled.rows, sampled.failures) == (expected.rows, expected.failures)
        assert sampled.token_ids == expected.token_ids
        assert sampled.logprobs.keys() == expected.logprobs.keys()
        for row, report in sampled.logprobs.items():
            assert report.token_ids == expected.logprobs[row].token_ids
            assert report.rank == expected.logprobs[row].rank
            assert report.logprobs == pytest.approx(expected.logprobs[row].logprobs, abs=1e-4)
        assert sampler.last_tokens[torch.from_numpy(rows).cuda()].cpu().tolist() == step.token_ids.tolist()
