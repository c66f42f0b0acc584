"""The kinds of numbers that are reported of tokens, against a computation in float64 with nothing in common."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from no_host_reads import no_host_reads
from sampler_launch import launch
from sampling_oracle import Request, random_logits, random_request

from eagleray.kernels.ranking import Ranking
from eagleray.messages.outputs import TokenLogprobs
from eagleray.messages.sampling import Sampling
from eagleray.worker.device_sampler import DeviceSampler
from eagleray.worker.logprobs import ScoreKind, score_prompt
from eagleray.worker.sampler import HostSampler, Sampled
from eagleray.worker.sampling_state import SamplingState

MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
CPU = torch.device("cpu")
MARGIN = 1e-6


def make_sampler(kind: str, mode: Any, num_rows: int, vocab_size: int) -> HostSampler | DeviceSampler:
    if kind == "device":
        return DeviceSampler(
            num_rows=num_rows, vocab_size=vocab_size, device=CPU, split_size=64, reported_kind=ScoreKind.of(mode)
        )
    state = SamplingState(num_rows=num_rows, vocab_size=vocab_size, device=CPU)
    return HostSampler(state, Ranking(), ScoreKind.of(mode))


def sample(kind: str, mode: str, logits: torch.Tensor, requests: list[Request]) -> Sampled:
    sampler = make_sampler(kind, mode, len(requests), logits.shape[1])
    for row, request in enumerate(requests):
        sampler.add_row(row, request.sampling, request.known, len(request.prompt))
    rows, positions = np.arange(len(requests)), np.array([len(request.known) for request in requests])
    step = launch(sampler, logits.clone(), rows, positions)
    return step.finish([tensor.numpy() for tensor in step.tensors])


def adjusted(raw: torch.Tensor, request: Request) -> torch.Tensor:
    """Return the float64 logits [vocab_size] before temperature."""
    own, generated = request.sampling, request.generated
    values = raw.double()
    for token in range(len(values)):
        text = [*generated, token]
        is_bad = any(len(word) <= len(text) and tuple(text[len(text) - len(word) :]) == word for word in own.bad_words)
        is_early = len(generated) < own.min_tokens and token in own.suppressed_token_ids
        if is_bad or is_early or (own.allowed_token_ids and token not in own.allowed_token_ids):
            values[token] = -torch.inf
        values[token] += own.logit_bias.get(token, 0.0)
        if token in request.known:
            factor = own.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= own.frequency_penalty * generated.count(token) + own.presence_penalty * (token in generated)
    return values


def processed(raw: torch.Tensor, request: Request) -> tuple[torch.Tensor, bool]:
    """Return the float64 logits [vocab_size] that a token is drawn from, and whether no token is near a boundary."""
    own = request.sampling
    values = adjusted(raw, request)
    if own.temperature == 0:
        return values, True
    values /= own.temperature
    if not own.top_k and own.top_p == 1 and own.min_p == 0:
        return values, True
    ratio = torch.exp(values - values.max())
    # float32 may order tokens otherwise whose float64 are this close
    gaps = values.sort().values.diff()
    is_certain = not ((gaps > 0) & (gaps < 1e-5)).any() and not (0 < (ratio - own.min_p).abs().min() < MARGIN)
    dropped = ratio < own.min_p
    order = torch.argsort(values, descending=True, stable=True)
    if own.top_k:
        dropped[order[own.top_k :]] = True
    weights = ratio.masked_fill(dropped, 0)[order]
    before = weights.cumsum(0) - weights
    bound = own.top_p * weights.sum()
    if own.top_p < 1:
        is_certain = is_certain and not ((before - bound).abs() < MARGIN * weights.sum()).any()
        dropped[order[before >= bound]] = True
    return values.masked_fill(dropped, -torch.inf), bool(is_certain)


def check(report: TokenLogprobs, expected: torch.Tensor, *, is_logits: bool) -> None:
    chosen, *others = report.token_ids
    scores = expected if is_logits else torch.log_softmax(expected, -1)
    assert report.logprobs == pytest.approx(scores[report.token_ids].tolist(), abs=2e-4, rel=1e-5)
    above = (expected > expected[chosen] + 1e-5 * (1 + expected[chosen].abs())).sum()
    assert 1 + above <= report.rank <= 1 + above + (expected == expected[chosen]).sum() + 2
    ranked = [scores[token].item() for token in others]
    assert all(first >= second - 1e-4 for first, second in itertools.pairwise(ranked))


@pytest.mark.parametrize(
    ("mode", "vocab_size"),
    [
        *((mode, 37) for mode in MODES),
        # Of a vocabulary in several splits one mode has each step: the softmax, and the cuts before it.
        *(pytest.param(mode, 600, marks=() if mode == "processed_logprobs" else pytest.mark.grid) for mode in MODES),
    ],
)
@pytest.mark.parametrize("kind", ["host", "device"])
def test_sampler_reports_numbers_of_its_mode(kind: str, mode: str, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    num_checked = num_dropped = 0
    for _ in range(6 if kind == "host" and vocab_size < 600 else 1):  # the kernels are interpreted
        requests = [random_request(rng, vocab_size) for _ in range(12)]
        for request in requests[:11]:
            request.sampling = replace(request.sampling, logprobs=int(rng.integers(0, 9)))
        logits = random_logits(rng, len(requests), vocab_size)
        sampled = sample(kind, mode, logits, requests)
        assert set(sampled.logprobs) == set(sampled.rows) - {11}
        for row, report in sampled.logprobs.items():
            assert report.token_ids[0] == sampled.token_ids[sampled.rows.index(row)]
            expected, is_certain = logits[row].double(), True
            if mode.startswith("processed"):
                expected, is_certain = processed(logits[row], requests[row])
                assert np.isfinite(report.logprobs[0])
                num_dropped += bool(expected.isinf().any())
            if is_certain:
                check(report, expected, is_logits=mode.endswith("logits"))
                num_checked += 1
    assert num_checked > 5
    assert num_dropped > 2 or mode.startswith("raw")


CASES = {
    "greedy rows drop nothing": ({"temperature": 0.0, "top_k": 2, "top_p": 0.1, "min_p": 0.9}, [3.0, 2.0, 1.0, 0.0]),
    "a temperature divides": ({"temperature": 0.5}, [6.0, 4.0, 2.0, 0.0]),
    "top_k": ({"top_k": 2, "temperature": 0.5}, [6.0, 4.0, None, None]),
    "top_k of one": ({"top_k": 1, "temperature": 0.5}, [6.0, None, None, None]),
    "top_p": ({"top_p": 0.7}, [3.0, 2.0, None, None]),
    "min_p": ({"min_p": 0.2}, [3.0, 2.0, None, None]),
    "min_p before top_p": ({"min_p": 0.2, "top_p": 0.73}, [3.0, None, None, None]),
    "bias": ({"logit_bias": {3: 4.0}}, [3.0, 2.0, 1.0, 4.0]),
    "allowed": ({"allowed_token_ids": (0, 2)}, [3.0, None, 1.0, None]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["host", "device"])
def test_processed_logits_of_each_parameter_are_as_computed_by_hand(kind: str, case: str) -> None:
    parameters, expected = CASES[case]
    numbers = [-np.inf if value is None else value for value in expected]
    request = Request(Sampling(seed=1, logprobs=4, **parameters), [9 % 4], [])
    report = sample(kind, "processed_logits", torch.tensor([[3.0, 2.0, 1.0, 0.0]]), [request]).logprobs[0]
    assert dict(zip(report.token_ids, report.logprobs, strict=True)) == pytest.approx(dict(enumerate(numbers)))
    likeliest = [numbers[token] for token in report.token_ids[1:]]
    assert likeliest == sorted(numbers, reverse=True)
    assert report.rank == 1 + sum(value > numbers[report.token_ids[0]] for value in numbers)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_processed_logprobs_of_a_resumed_request_equal_the_first_run(kind: str) -> None:
    rng = np.random.default_rng(5)
    logits = [random_logits(rng, 1, 50) for _ in range(6)]
    sampling = replace(random_request(rng, 50).sampling, temperature=0.8, top_p=0.8, logprobs=3, allowed_token_ids=())
    sampling = replace(sampling, bad_words=(), frequency_penalty=0.7, repetition_penalty=1.3)
    whole = make_sampler(kind, "processed_logprobs", 1, 50)
    whole.add_row(0, sampling, [1, 2], 2)
    reports, tokens = [], []
    for index, line in enumerate(logits):
        step = launch(whole, line.clone(), np.array([0]), np.array([2 + index]))
        sampled = step.finish([tensor.numpy() for tensor in step.tensors])
        reports.append(sampled.logprobs[0])
        tokens += sampled.token_ids
    for start in range(1, 6):
        request = Request(sampling, [1, 2], tokens[:start])
        assert sample(kind, "processed_logprobs", logits[start], [request]).logprobs[0] == reports[start]


@pytest.mark.parametrize("kind", ["host", "device"])
def test_processed_logprobs_of_rows_that_fail_leave_the_others_right(kind: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(4, 1)
    logits[1, 2] = torch.nan
    forbidden = {"allowed_token_ids": (1, 2), "bad_words": ((1,), (2,))}
    parameters: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.5}, forbidden, {"min_p": 0.9}]
    requests = [Request(Sampling(seed=3, logprobs=3, **own), [0], []) for own in parameters]
    sampled = sample(kind, "processed_logprobs", logits, requests)
    assert [(failure.row, failure.is_user_error) for failure in sampled.failures] == [(1, False), (2, True)]
    assert set(sampled.logprobs) == {0, 3}
    for row in (0, 3):
        check(sampled.logprobs[row], processed(logits[row], requests[row])[0], is_logits=False)


def test_device_sampler_processed_reports_read_nothing_on_the_host() -> None:
    sampler = make_sampler("device", "processed_logprobs", 3, 90)
    for row, sampling in enumerate([Sampling(seed=0, logprobs=2), Sampling(seed=1, top_p=0.5, logprobs=0)]):
        sampler.add_row(row, sampling, [1], 1)
    with no_host_reads():
        step = launch(sampler, torch.randn(2, 90), np.array([0, 1]), np.array([1, 1]))
    assert set(step.finish([tensor.numpy() for tensor in step.tensors]).logprobs) == {0, 1}


def test_sampler_large_top_k_and_many_rows_are_processed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("logprobs", "random_sampler", "device_processed_logits"):
        monkeypatch.setattr(f"eagleray.worker.{module}.CHUNK_ELEMENTS", {"cpu": 2000})
    logits = torch.randn(7, 900)
    requests = [Request(Sampling(seed=row, top_k=300 + 90 * row, logprobs=5), [1], []) for row in range(7)]
    for kind in ("host", "device"):
        reports = sample(kind, "processed_logprobs", logits, requests).logprobs
        for row, request in enumerate(requests):
            check(reports[row], processed(logits[row], request)[0], is_logits=False)


def test_score_prompt_in_a_mode_of_logits_returns_logits() -> None:
    logits = torch.randn(5, 40)
    token_ids, scores, ranks = score_prompt(logits, torch.arange(5)[:, None], 2, Ranking(), is_logits=True)
    assert torch.equal(scores, logits.gather(1, token_ids.long()))
    assert ranks.tolist() == [1 + int((line > line[index]).sum()) for index, line in enumerate(logits)]
