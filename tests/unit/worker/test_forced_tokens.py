"""Rows whose tokens are given in advance: the sampler reports the numbers of the model for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampler_launch import launch
from sampling_oracle import random_logits

from eagleray.kernels.ranking import Ranking
from eagleray.messages.sampling import Sampling
from eagleray.worker.device_sampler import DeviceSampler
from eagleray.worker.logprobs import ScoreKind
from eagleray.worker.sampler import HostSampler, Sampled
from eagleray.worker.sampling_state import SamplingState

CPU = torch.device("cpu")
KINDS = ["host", "device"]


def make_sampler(kind: str, mode: Any, vocab_size: int) -> HostSampler | DeviceSampler:
    reported = ScoreKind.of(mode)
    if kind == "device":
        return DeviceSampler(num_rows=3, vocab_size=vocab_size, device=CPU, split_size=64, reported_kind=reported)
    return HostSampler(SamplingState(num_rows=3, vocab_size=vocab_size, device=CPU), Ranking(), reported)


def step(sampler: HostSampler | DeviceSampler, logits: torch.Tensor, rows: list[int], position: int) -> Sampled:
    launched = launch(sampler, logits.clone(), np.array(rows), np.full(len(rows), position))
    return launched.finish([tensor.numpy() for tensor in launched.tensors])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_row_gets_its_tokens_and_real_numbers(kind: str, temperature: float) -> None:
    rng, forced = np.random.default_rng(3), (7, 7, 0, 39)
    sampler, free = (make_sampler(kind, "raw_logprobs", 40) for _ in range(2))
    parameters = {"seed": 5, "temperature": temperature, "logprobs": 2, "frequency_penalty": 0.5}
    for one in (sampler, free):
        one.add_row(0, Sampling(seed=1, temperature=temperature), [1, 2], 2)
    sampler.add_row(2, Sampling(forced_token_ids=forced, **parameters), [1, 2], 2)
    free.add_row(2, Sampling(**parameters), [1, 2], 2)
    for index, token in enumerate(forced):
        logits = random_logits(rng, 2, 40)
        sampled, other = (step(one, logits, [0, 2], 2 + index) for one in (sampler, free))
        assert sampled.token_ids == [other.token_ids[0], token]
        report = sampled.logprobs[2]
        expected = torch.log_softmax(logits[1].double(), -1)
        assert report.token_ids == [token, *other.logprobs[2].token_ids[1:]]
        assert report.logprobs == pytest.approx(expected[report.token_ids].tolist(), abs=1e-4)
        assert report.rank == 1 + int((logits[1] > logits[1, token]).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_forced_row_of_a_resumed_request_continues_where_it_was(kind: str) -> None:
    rng, forced = np.random.default_rng(4), (3, 1, 4, 1, 5)
    sampling = Sampling(seed=0, forced_token_ids=forced, logprobs=0, repetition_penalty=1.4, bad_words=((3, 1),))
    logits = [random_logits(rng, 1, 9) for _ in forced]
    whole = make_sampler(kind, "processed_logits", 9)
    whole.add_row(0, sampling, [8], 1)
    reports = [step(whole, line, [0], 1 + index).logprobs[0] for index, line in enumerate(logits)]
    assert tuple(report.token_ids[0] for report in reports) == forced
    assert reports[1].logprobs == [-np.inf]  # the bad word is generated, and had no probability
    for start in range(1, len(forced)):
        resumed = make_sampler(kind, "processed_logits", 9)
        resumed.add_row(1, sampling, [8, *forced[:start]], 1)
        assert step(resumed, logits[start], [1], 1 + start).logprobs[1] == reports[start]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restriction", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_forced_token_that_is_dropped_has_minus_infinity(kind: str, restriction: dict[str, Any]) -> None:
    sampler = make_sampler(kind, "processed_logprobs", 4)
    sampler.add_row(0, Sampling(seed=0, forced_token_ids=(3, 0), logprobs=0, **restriction), [1], 1)
    logits = torch.tensor([[4.0, 2.0, 1.0, 0.0]])
    assert step(sampler, logits, [0], 1).logprobs[0].logprobs == [-np.inf]
    assert step(sampler, logits, [0], 2).logprobs[0].logprobs[0] > -0.2


@pytest.mark.parametrize("kind", KINDS)
def test_forced_row_whose_logits_are_broken_fails(kind: str) -> None:
    sampler = make_sampler(kind, "raw_logprobs", 4)
    sampler.add_row(0, Sampling(seed=0, forced_token_ids=(3,), logprobs=0), [1], 1)
    sampled = step(sampler, torch.full((1, 4), torch.nan), [0], 1)
    assert (sampled.rows, [failure.row for failure in sampled.failures]) == ([], [0])


@pytest.mark.parametrize("kind", KINDS)
def test_row_after_a_forced_one_samples_freely(kind: str) -> None:
    sampler = make_sampler(kind, "raw_logprobs", 4)
    sampler.add_row(0, Sampling(seed=0, forced_token_ids=(3,)), [1], 1)
    sampler.free_row(0)
    sampler.add_row(0, Sampling(seed=0, temperature=0.0), [1], 1)
    assert step(sampler, torch.tensor([[0.0, 5.0, 1.0, 0.0]]), [0], 1).token_ids == [1]
