from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from msgspec.structs import replace
from no_host_reads import no_host_reads
from random_grammars import TOKENS_TO_FAILURE, grammar_rows, random_grammar
from sampler_launch import launch
from sampling_oracle import Request, random_logits, random_request

from eagleray.kernels.cuda.triton.logit_adjustments import keep_masked
from eagleray.kernels.cuda.triton.sampling import _uniform
from eagleray.kernels.ranking import Ranking
from eagleray.messages.sampling import Sampling
from eagleray.worker import device_sampler, device_sampling_state
from eagleray.worker.device_sampler import DeviceSampler
from eagleray.worker.random_sampler import stream_of, uniform
from eagleray.worker.sampler import HostSampler, Sampled
from eagleray.worker.sampling_state import SamplingState

UNKNOWN = -7


@dataclass
class Pair:
    """A sampler for CPUs and one for devices with the same requests. The latter is never told a token."""

    vocab_size: int
    split_size: int = 64
    num_rows: int = 8
    requests: dict[int, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        state = SamplingState(num_rows=self.num_rows, vocab_size=self.vocab_size, device=torch.device("cpu"))
        self.sampler = HostSampler(state, Ranking(), grammars=grammar_rows(self.vocab_size))
        self.device_sampler = DeviceSampler(
            num_rows=self.num_rows,
            vocab_size=self.vocab_size,
            device=torch.device("cpu"),
            split_size=self.split_size,
            grammars=grammar_rows(self.vocab_size, num_threads=2),
        )
        self.device_sampler.last_tokens.fill_(UNKNOWN)

    def start(self, row: int, request: Request) -> None:
        self.requests[row] = Request(request.sampling, request.prompt, list(request.generated))
        self.sampler.add_row(row, request.sampling, request.known, len(request.prompt))
        self.device_sampler.add_row(row, request.sampling, request.known, len(request.prompt))

    def step(self, logits: torch.Tensor, rows: list[int]) -> tuple[Sampled, Sampled]:
        """Sample with both, and return the results of the CPU's and of the device's."""
        positions = [len(self.requests[row].known) for row in rows]
        expected = launch(self.sampler, logits.clone(), np.array(rows), np.array(positions)).finish([])
        for row, token in zip(expected.rows, expected.token_ids, strict=True):
            self.requests[row].generated.append(token)

        before = self.device_sampler.last_tokens.clone()
        poisoned = torch.full((len(rows) + 2, self.vocab_size + 3), torch.nan)
        poisoned[1:-1, 1:-2] = logits
        with no_host_reads():
            step = launch(self.device_sampler, poisoned[1:-1, 1:-2], np.array(rows), np.array(positions))
        sampled = step.finish([tensor.numpy() for tensor in step.tensors])

        assert poisoned[[0, -1]].isnan().all() and poisoned[:, [0, -2, -1]].isnan().all()
        token_of = dict.fromkeys(rows, 0) | dict(zip(sampled.rows, sampled.token_ids, strict=True))
        assert step.token_ids.tolist() == list(token_of.values())
        assert self.device_sampler.last_tokens.tolist() == [
            token_of.get(row, known) for row, known in enumerate(before.tolist())
        ]
        return expected, sampled


def check_step(pair: Pair, logits: torch.Tensor, rows: list[int]) -> Sampled:
    """Sample with both samplers, check that they agree, and return the result."""
    expected, sampled = pair.step(logits, rows)
    assert sampled == expected
    return sampled


@pytest.mark.parametrize(
    "vocab_size, split_size", [(3, 16), (37, 16), pytest.param(300, 64, marks=pytest.mark.grid), (600, 512)]
)
def test_device_sampler_random_requests_equal_cpu_sampler(vocab_size: int, split_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    pair = Pair(vocab_size, split_size)

    def request() -> Request:
        made = random_request(rng, vocab_size)
        if rng.random() < 0.7:
            return made
        requested = tuple(rng.integers(0, vocab_size, size=rng.integers(0, 4)).tolist())
        reported = replace(made.sampling, logprobs=int(rng.integers(0, 6)), logprob_token_ids=requested)
        if rng.random() < 0.5:
            return Request(reported, made.prompt, made.generated)
        return Request(replace(reported, grammar=random_grammar(str(rng.integers(10, 99)))), made.prompt, [])

    for row in range(8):
        pair.start(row, request())
    num_sampled = num_reported = 0
    for _ in range(6):
        if rng.random() < 0.6:  # a row ends, another request takes it
            pair.start(int(rng.integers(0, 8)), request())
        rows = rng.permutation(8)[: rng.integers(1, 9)].tolist()
        sampled = check_step(pair, random_logits(rng, len(rows), vocab_size), rows)
        num_sampled += len(sampled.rows)
        num_reported += len(sampled.logprobs)
    assert num_sampled > 10 and num_reported > 2


LOGITS = {
    "equal": torch.zeros(200),
    "almost_equal": torch.linspace(0, 1e-5, 200)[torch.randperm(200, generator=torch.Generator().manual_seed(0))],
    "zeros_of_both_signs": torch.zeros(200).copysign(torch.arange(200) % 3 - 0.5),
    "two_values": torch.arange(200).remainder(2).float(),
    "one_likely": torch.eye(200)[150] * 80,
    "steep": torch.arange(200).float().neg(),
    "some_impossible": torch.where(torch.arange(200) % 3 == 0, torch.arange(200).float() / 50, -torch.inf),
    "flat": torch.randn(200, generator=torch.Generator().manual_seed(1)) * 0.3,
}
HARD_LOGITS = ("almost_equal", "two_values", "some_impossible")
"""Logits whose cuts are hardest to find: within equal numbers, near each other, and among impossible tokens."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in HARD_LOGITS else pytest.mark.grid) for name in LOGITS],
)
def test_device_sampler_cuts_of_any_logits_equal_cpu_sampler(name: str) -> None:
    restrictions = [
        {"top_p": 0.3},
        {"top_p": 0.999999},
        {"top_p": 1e-9},
        {"top_k": 2},
        {"top_k": 67},
        {"top_k": 199},
        {"top_k": 90, "top_p": 0.7},
        {"top_k": 5, "min_p": 0.4},
        {"top_p": 0.8, "min_p": 0.01, "temperature": 1e30},
        {"top_k": 3, "top_p": 0.9, "temperature": 1e-3},
        {"min_p": 1.0},
        *({"top_k": 130} for _ in range(3)),  # of two values, a part of the lower ones
    ]
    pair = Pair(200, num_rows=len(restrictions))
    for row, restriction in enumerate(restrictions):
        pair.start(row, Request(Sampling(seed=row, **restriction), [0] * (1 + row), []))
    check_step(pair, LOGITS[name].repeat(pair.num_rows, 1), list(range(pair.num_rows)))
    assert not pair.device_sampler._workspace.histogram.any()


def test_device_sampler_greedy_step_takes_first_of_equal_logits() -> None:
    pair = Pair(150)
    for row in range(3):
        pair.start(row, Request(Sampling(seed=0, temperature=0.0), [1], []))
    logits = torch.zeros((3, 150))
    logits[1, [149, 70, 80]] = 2.0
    logits[2] = -torch.inf
    logits[2, 149] = -5.0
    assert check_step(pair, logits, [2, 0, 1]).token_ids == [0, 70, 149]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=4, temperature=0.0),
        Sampling(seed=4, top_p=0.9, logprobs=2),
        Sampling(seed=4, allowed_token_ids=(1, 2), presence_penalty=1.0),
    ],
)
def test_device_sampler_row_without_finite_logits_fails_alone(bad: float, sampling: Sampling) -> None:
    logits = random_logits(np.random.default_rng(3), 4, 50)
    pair = Pair(50, split_size=16)
    for row in range(4):
        pair.start(row, Request(sampling, [row], []))
    if bad == -torch.inf:
        logits[2] = bad
    else:
        logits[2, 17] = bad
    sampled = check_step(pair, logits, [0, 1, 2, 3])
    assert [failure.row for failure in sampled.failures] == [2] and not sampled.failures[0].is_user_error


def test_device_sampler_row_without_allowed_token_fails_alone() -> None:
    pair = Pair(4)
    pair.start(5, Request(Sampling(seed=0, allowed_token_ids=(1, 2), bad_words=((1,), (2,)), logprobs=1), [0], []))
    pair.start(2, Request(Sampling(seed=0, temperature=0.0, allowed_token_ids=(1, 2), bad_words=((1,),)), [0], []))
    sampled = check_step(pair, torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2), [5, 2])
    (failure,) = sampled.failures
    assert failure.row == 5 and failure.is_user_error


def test_device_sampler_rows_with_grammars_equal_cpu_sampler() -> None:
    """Grammars beside rows without one, with every feature that follows a mask, in two threads."""
    rng = np.random.default_rng(6)
    features = [
        {"temperature": 0.0},
        {"top_p": 0.9, "logprobs": 3},
        {"top_k": 5, "logit_bias": {3: 4.0}, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 2, "logprob_token_ids": (7,)},
    ]
    pair = Pair(100, num_rows=12)
    for row in range(12):
        grammar = None if row % 6 == 5 else random_grammar(str(row))
        pair.start(row, Request(Sampling(seed=row, grammar=grammar, **features[row % 4]), [1, 2], []))
    for _ in range(3):
        rows = rng.permutation(12)[:11].tolist()
        assert len(check_step(pair, random_logits(rng, 11, 100), rows).rows) == 11


def test_device_sampler_grammar_that_fails_ends_its_row_alone() -> None:
    pair = Pair(40)
    for row, source in enumerate(["0", TOKENS_TO_FAILURE, "2"]):
        pair.start(row, Request(Sampling(seed=0, temperature=0.0, grammar=random_grammar(source)), [0], []))
    for _ in range(int(TOKENS_TO_FAILURE)):
        assert not check_step(pair, torch.arange(40).float().repeat(3, 1), [0, 1, 2]).failures
    logits = torch.arange(40).float().repeat(3, 1)
    (failure,) = check_step(pair, logits, [2, 1, 0]).failures
    assert (failure.row, failure.message) == (1, "the grammar has ended") and failure.is_user_error
    logits[1] = torch.nan
    (failure,) = check_step(pair, logits, [2, 1, 0]).failures
    assert "no finite logits" in failure.message and not failure.is_user_error


@pytest.mark.parametrize("vocab_size", [1, 32, 1024, 2500])
def test_keep_masked_kernel_equals_torch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn((5, vocab_size + 3), generator=generator)
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    indices = torch.tensor([4, 0, 3], dtype=torch.int32)
    expected = logits.clone()
    Ranking().keep_allowed(expected[:, 1 : vocab_size + 1], indices.long(), masks)
    keep_masked(logits[:, 1 : vocab_size + 1], indices, masks)
    assert torch.equal(logits, expected) and torch.isinf(logits).any()


def test_device_sampler_penalties_and_bad_words_follow_tokens_of_the_device() -> None:
    rng = np.random.default_rng(9)
    pair = Pair(12, split_size=16)
    for row in range(6):
        words = tuple(tuple(rng.integers(0, 12, size=1 + row % 4).tolist()) for _ in range(150 if row % 2 else 0))
        sampling = Sampling(
            seed=row,
            temperature=0.0 if row < 3 else 1.0,
            frequency_penalty=row / 5,
            presence_penalty=-0.2 * (row > 3),
            repetition_penalty=1.0 if row % 3 else 1.3,
            bad_words=words,
        )
        pair.start(row, Request(sampling, [row, 3, 3], [4, 5, 4, 5, 6][: row + 1]))
    for _ in range(10):
        check_step(pair, random_logits(rng, 6, 12), list(range(6)))


def test_device_sampler_log_probabilities_equal_cpu_sampler() -> None:
    rng = np.random.default_rng(2)
    samplings = [
        Sampling(seed=0, logprobs=0),
        Sampling(seed=1),
        Sampling(seed=2, logprobs=5),
        Sampling(seed=3, logprob_token_ids=(4, 0, 4)),
        Sampling(seed=4, temperature=0.0, logprobs=80, logprob_token_ids=(1,)),
        Sampling(seed=5, temperature=3.0, logprobs=3, logprob_token_ids=tuple(range(70)) * 5),
    ]
    for adjusted in ({}, {"logit_bias": {11: 60.0}}):
        pair = Pair(70)
        for row, sampling in enumerate(samplings):
            pair.start(row, Request(replace(sampling, **adjusted), [1], []))
        assert len(check_step(pair, random_logits(rng, 6, 70), [3, 1, 0, 2, 5, 4]).logprobs) == 5
        assert len(check_step(pair, random_logits(rng, 2, 70), [2, 0]).logprobs) == 2


def test_device_sampler_steady_step_uploads_rows_and_positions_alone() -> None:
    pair = Pair(30)
    for row in range(4):
        pair.start(row, random_request(np.random.default_rng(row), 30))
    rows = [3, 0, 1, 2]
    pair.step(torch.zeros((4, 30)), rows)
    prepared = pair.device_sampler.prepare(np.array(rows), np.array([20, 21, 22, 23]))
    assert prepared.words.dtype == np.int32
    assert prepared.words.tolist() == [3, 0, 1, 2, 20, 21, 22, 23]
    fewer = pair.device_sampler.prepare(np.array(rows[:3]), np.array([30, 31, 32]))
    assert fewer.words.tolist() == [3, 0, 1, 0, 30, 31, 32, 0], "each part begins at a multiple of 16 bytes"


@pytest.mark.parametrize("vocab_size", [3, 90])
def test_device_sampler_warm_up_runs_every_kernel_and_leaves_nothing(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = set()
    launches = {
        device_sampler.sampling: ("find_first", "cut_front", "draw"),
        device_sampler.adjustments: (
            "keep_masked",
            "keep_allowed",
            "forbid_bad_words",
            "suppress",
            "add_bias",
            "penalise",
        ),
        device_sampler: ("collect_reported",),
        device_sampling_state: ("apply_segments", "write_counts"),
    }

    def recording(name: str, launch: Callable[..., None]) -> Callable[..., None]:
        def record(*args: object, **options: object) -> None:
            launched.add((name, *(option for option in options.values() if isinstance(option, bool))))
            launch(*args, **options)

        return record

    for module, names in launches.items():
        for name in names:
            monkeypatch.setattr(module, name, recording(name, getattr(module, name)))
    pair = Pair(vocab_size)
    pair.device_sampler.warm_up(3, num_logprobs=2)
    without_options = {name for names in launches.values() for name in names} - {"find_first", "cut_front"}
    assert launched == {
        *((name,) for name in without_options),
        *(("find_first", is_adjusted, is_chosen) for is_adjusted in (False, True) for is_chosen in (False, True)),
        *(("cut_front", by_weight) for by_weight in (False, True)),
    }
    pair.start(1, Request(Sampling(seed=0, temperature=0.0), [1], []))
    assert check_step(pair, torch.arange(vocab_size).float().repeat(1, 1), [1]).token_ids == [vocab_size - 1]


def test_device_sampler_memory_of_freed_rows_is_reused() -> None:
    pair = Pair(60, num_rows=4)
    everything = Sampling(
        seed=1,
        temperature=2.0,
        top_k=2,
        presence_penalty=2.0,
        repetition_penalty=2.0,
        logit_bias={0: 50.0},
        allowed_token_ids=(0, 1),
        bad_words=((0,), (2, 3)) * 50,
        min_tokens=50,
        suppressed_token_ids=(3,),
        logprobs=2,
        logprob_token_ids=(1,),
    )
    plain = Sampling(seed=1, temperature=0.0)
    logits = torch.arange(60).float().repeat(2, 1)
    sizes = []
    for round_ in range(12):
        row = round_ % 4
        pair.start(row, Request(everything, [3, 3], [2, 3]))
        pair.device_sampler.free_row(row)  # before it reached the device
        pair.start(row, Request(everything, [3, 3], [2, 3]))
        pair.start((row + 1) % 4, Request(plain, [3], [2]))
        sampled = check_step(pair, logits, [row, (row + 1) % 4])
        assert sampled.token_ids[1] == 59 and len(sampled.logprobs) == 1
        state = pair.device_sampler._state
        sizes.append((len(state.memory), len(state.counts)))
        pair.device_sampler.free_row(row)
        pair.sampler.free_row(row)
    assert len(set(sizes[1:])) == 1


@triton.jit
def _store_uniforms(streams, positions, out):
    at = tl.program_id(0)
    tl.store(out + at, _uniform(tl.load(streams + at).to(tl.uint64, bitcast=True), tl.load(positions + at)))


def test_uniform_of_kernel_equals_that_of_the_host_bit_for_bit() -> None:
    streams = np.array([stream_of(seed) for seed in (0, 1, -1, 42, 2**63 - 1, -(2**63) + 1, 7, 7)], dtype=np.uint64)
    positions = np.array([0, 1, 17, 40_000, 3, 2**31 - 1, 5, 6])
    out = torch.full((8,), torch.nan, dtype=torch.float64)
    _store_uniforms[(8,)](torch.from_numpy(streams.view(np.int64)), torch.from_numpy(positions.astype(np.int32)), out)
    assert out.tolist() == uniform(streams, positions).tolist()
