from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_oracle import Request, choose, random_logits, random_request

from eagleray.kernels.ranking import Ranking
from eagleray.messages.sampling import Sampling
from eagleray.worker import random_sampler
from eagleray.worker.sampler import HostSampler, Sampled
from eagleray.worker.sampling_state import SamplingState

CPU = torch.device("cpu")


class Bench:
    """A sampler with its state, and the tokens that each row's request has generated."""

    def __init__(self, vocab_size: int, num_rows: int = 16) -> None:
        self.state = SamplingState(num_rows=num_rows, vocab_size=vocab_size, device=CPU)
        self.sampler = HostSampler(self.state, Ranking())
        self.requests: dict[int, Request] = {}

    def start(self, row: int, request: Request) -> None:
        self.requests[row] = Request(request.sampling, request.prompt, list(request.generated))
        self.state.add_row(row, request.sampling, request.known, len(request.prompt))

    def sample(self, logits: torch.Tensor, rows: list[int]) -> Sampled:
        positions = [len(self.requests[row].known) for row in rows]
        return self.sampler.sample(logits.clone(), np.array(rows), np.array(positions))

    def step(self, logits: torch.Tensor, rows: list[int]) -> Sampled:
        sampled = self.sample(logits, rows)
        self.state.append_tokens(sampled.rows, sampled.token_ids)
        for row, token in zip(sampled.rows, sampled.token_ids, strict=True):
            self.requests[row].generated.append(token)
        return sampled


def sample_one(logits: torch.Tensor, sampling: Sampling, prompt: tuple[int, ...] = (0,), *generated: int) -> Sampled:
    bench = Bench(logits.shape[-1], num_rows=1)
    bench.start(0, Request(sampling, list(prompt), list(generated)))
    return bench.sample(logits.reshape(1, -1), [0])


def token_of(logits: torch.Tensor, sampling: Sampling, prompt: tuple[int, ...] = (0,), *generated: int) -> int:
    (token,) = sample_one(logits, sampling, prompt, *generated).token_ids
    return token


@pytest.mark.parametrize("vocab_size", [3, 11, 60, 600])
def test_sampler_equals_the_oracle(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    num_compared = 0
    for _ in range(15):
        bench = Bench(vocab_size, num_rows=8)
        for row in range(8):
            bench.start(row, random_request(rng, vocab_size))
        for _ in range(6):
            if rng.random() < 0.5:  # a row ends, another request takes it
                bench.start(int(rng.integers(0, 8)), random_request(rng, vocab_size))
            rows = rng.permutation(8)[: rng.integers(1, 9)].tolist()
            logits = random_logits(rng, len(rows), vocab_size)
            expected = {row: choose(logits[line].numpy(), bench.requests[row]) for line, row in enumerate(rows)}
            sampled = bench.step(logits, rows)
            assert {failure.row for failure in sampled.failures} == {
                row for row, choice in expected.items() if choice.token is None
            }
            tokens = dict(zip(sampled.rows, sampled.token_ids, strict=True))
            certain = {row: expected[row].token for row in tokens if expected[row].is_certain}
            assert {row: tokens[row] for row in certain} == certain
            num_compared += len(certain)
    assert num_compared > 250


@pytest.mark.parametrize("vocab_size", [1999, 5003])
def test_sampler_token_is_equal_alone_and_in_a_batch(vocab_size: int) -> None:
    rng = np.random.default_rng(1)
    logits = torch.cat([random_logits(rng, 1, vocab_size) for _ in range(12)])
    requests = [random_request(rng, vocab_size) for _ in range(12)]

    def tokens_of(members: list[int]) -> dict[int, object]:
        """Return tokens by request; requests get rows in the order of `members`."""
        bench = Bench(vocab_size)
        for row, member in enumerate(members):
            bench.start(row, requests[member])
        sampled = bench.sample(logits[members], list(range(len(members))))
        tokens = dict(zip(sampled.rows, sampled.token_ids, strict=True))
        return {member: tokens.get(row) for row, member in enumerate(members)}

    alone = {member: tokens_of([member])[member] for member in range(12)}
    for _ in range(12):
        members = rng.permutation(12)[: rng.integers(2, 13)].tolist()
        assert tokens_of(members) == {member: alone[member] for member in members}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=0),
        Sampling(seed=0, temperature=1.3, min_p=0.01),
        Sampling(seed=0, top_p=0.9),
        Sampling(seed=0, temperature=0.7, top_k=40, top_p=0.9),
        Sampling(seed=0, temperature=3.0, top_k=700),
    ],
)
def test_sampler_chunks_and_draw_method_do_not_change_tokens(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size, rows = 3001, list(range(16))
    logits = random_logits(np.random.default_rng(2), 16, vocab_size)

    def tokens() -> list[int]:
        bench = Bench(vocab_size)
        for row in rows:
            bench.start(row, Request(Sampling(**{**as_dict(sampling), "seed": row}), [1], []))
        return bench.sample(logits, rows).token_ids

    expected = tokens()
    monkeypatch.setattr(random_sampler, "CHUNK_ELEMENTS", {"cpu": 5 * vocab_size})
    assert tokens() == expected
    monkeypatch.setattr(random_sampler, "FEW", 0)
    assert tokens() == expected
    monkeypatch.setattr(random_sampler, "FEW", vocab_size)
    assert tokens() == expected


def as_dict(sampling: Sampling) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def test_sampler_draws_of_many_seeds_follow_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -torch.inf, 2.0, -3.0])
    num_draws = 8000
    bench = Bench(8, num_rows=num_draws)
    for row in range(num_draws):
        bench.start(row, Request(Sampling(seed=row, temperature=1.5), [0] * (1 + row % 7), []))
    drawn = bench.sample(logits.repeat(num_draws, 1), list(range(num_draws))).token_ids
    expected = torch.softmax(logits.double() / 1.5, -1).numpy() * num_draws
    counts = np.bincount(drawn, minlength=8)
    assert counts[5] == 0
    present = expected > 0
    assert ((counts - expected)[present] ** 2 / expected[present]).sum() < 25  # 6 degrees of freedom: 1 in 3,000


def test_sampler_draws_of_many_positions_follow_probabilities() -> None:
    logits, num_draws = torch.tensor([[0.3, 0.0, -0.4, 1.0]]), 3000
    bench = Bench(4, num_rows=1)
    bench.start(0, Request(Sampling(seed=77), [0], []))
    drawn = [
        bench.sampler.sample(logits.clone(), np.array([0]), np.array([position])).token_ids[0]
        for position in range(num_draws)
    ]
    expected = torch.softmax(logits[0].double(), -1).numpy() * num_draws
    assert ((np.bincount(drawn, minlength=4) - expected) ** 2 / expected).sum() < 20  # 3 degrees of freedom


def test_sampler_seed_and_position_decide_the_token() -> None:
    logits = torch.zeros(1000)
    tokens = [token_of(logits, Sampling(seed=seed), prompt) for seed in (1, 1, 2) for prompt in ((5,), (5, 6))]
    assert tokens[:2] == tokens[2:4]
    assert len(set(tokens)) == 4


def test_sampler_greedy_takes_lowest_id_of_equal_logits() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0])
    for sampling in (Sampling(seed=3, temperature=0.0), Sampling(seed=3, top_k=1), Sampling(seed=3, temperature=1e-9)):
        assert token_of(logits, sampling) == 1


@pytest.mark.parametrize("few", [0, 256])
def test_sampler_top_k_keeps_exactly_k_of_equal_logits(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_sampler, "FEW", few)
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 2.0])
    drawn = {token_of(logits, Sampling(seed=seed, top_k=3)) for seed in range(60)}
    assert drawn == {1, 2, 4}


@pytest.mark.parametrize("top_p, kept", [(0.3, {0}), (0.7, {0, 1}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3})])
def test_sampler_top_p_keeps_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.4, 0.35, 0.15, 0.1]).log()
    assert {token_of(logits, Sampling(seed=seed, top_p=top_p)) for seed in range(100)} == kept


def test_sampler_top_p_applies_after_top_k() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()  # of the first two, the first has 57 %
    assert {token_of(logits, Sampling(seed=seed, top_k=2, top_p=0.5)) for seed in range(50)} == {0}


def test_sampler_min_p_is_relative_to_likeliest_token() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert {token_of(logits, Sampling(seed=seed, min_p=0.25)) for seed in range(100)} == {0, 1, 2}
    assert {token_of(logits, Sampling(seed=seed, min_p=1.0)) for seed in range(20)} == {0}


@pytest.mark.parametrize("temperature", [1e-4, 1e4, 1e38])
@pytest.mark.parametrize("restriction", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.5}])
def test_sampler_extreme_temperatures_are_greedy_or_flat(temperature: float, restriction: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 5.0, -torch.inf, 4.0, 3.0, 2.0, 4.5, 0.0]])
    drawn = {token_of(logits, Sampling(seed=seed, temperature=temperature, **restriction)) for seed in range(80)}
    if temperature < 1:
        assert drawn == {1}
    else:
        assert drawn == {"top_p": {1, 6, 3, 4}, "top_k": {1, 6, 3}}.get(next(iter(restriction), ""), {*range(8)} - {2})


def test_sampler_equal_logits_of_large_vocabulary_respect_top_p() -> None:
    drawn = [token_of(torch.zeros(20_000), Sampling(seed=seed, top_p=0.25)) for seed in range(20)]
    assert max(drawn) < 5000 and len(set(drawn)) == 20


def test_sampler_min_tokens_suppresses_ids_until_reached() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 9.0])
    sampling = Sampling(seed=0, temperature=0.0, min_tokens=2, suppressed_token_ids=(3,))
    prompt = (1, 1, 1, 1)
    assert token_of(logits, sampling, prompt) == 2
    assert token_of(logits, sampling, prompt, 1) == 2
    assert token_of(logits, sampling, prompt, 1, 1) == 3


def test_sampler_bad_words_match_generated_tokens_only() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 9.0])
    sampling = Sampling(seed=0, temperature=0.0, bad_words=((1, 2, 3), (0, 3)))
    assert token_of(logits, sampling, (1, 2)) == 3
    assert token_of(logits, sampling, (1,), 2) == 3
    assert token_of(logits, sampling, (1,), 1, 2) == 2
    assert token_of(logits, sampling, (1,), 0, 1, 2) == 2
    assert token_of(logits, sampling, (1,), 0) == 2
    assert token_of(logits, sampling, (1,), 0, 1) == 3


def test_sampler_bad_words_longer_sequence_added_later_matches() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]] * 2)
    bench = Bench(4, num_rows=2)
    bench.start(0, Request(Sampling(seed=0, temperature=0.0, bad_words=((3, 3),)), [1], []))
    assert bench.step(logits[:1], [0]).token_ids == [3]
    bench.start(1, Request(Sampling(seed=0, temperature=0.0, bad_words=((3, 3, 3), (2,))), [1], []))
    assert bench.step(logits, [0, 1]).token_ids == [2, 3]
    assert bench.step(logits, [1, 0]).token_ids == [3, 3]
    assert bench.step(logits, [1, 0]).token_ids == [1, 2]


def test_sampler_bias_applies_before_penalties_and_lifts_no_ban() -> None:
    banned = Sampling(seed=0, temperature=0.0, allowed_token_ids=(0, 1), logit_bias={2: 100.0, 0: 1.5})
    assert token_of(torch.tensor([0.0, 1.0, 5.0]), banned) == 0
    penalised = Sampling(seed=0, temperature=0.0, repetition_penalty=2.0, logit_bias={0: 3.0})
    assert token_of(torch.tensor([1.0, 1.9]), penalised, (0,)) == 0  # (1 + 3) / 2
    assert token_of(torch.tensor([1.0, 2.1]), penalised, (0,)) == 1


def test_sampler_penalties_of_changing_rows_equal_the_oracle() -> None:
    rng, vocab_size = np.random.default_rng(5), 90
    bench = Bench(vocab_size)
    for wave in range(4):
        for row in range(wave, 16, 1 + wave):
            sampling = Sampling(
                seed=row, temperature=0.0, frequency_penalty=row / 10, presence_penalty=0.3, repetition_penalty=1.2
            )
            prompt = [row, 3, 3, *range(row, 1 + row % 8 * 10)]
            bench.start(row, Request(sampling if row % 3 else Sampling(seed=row, temperature=0.0), prompt, []))
        rows = sorted(bench.requests)
        for _ in range(25):
            logits = random_logits(rng, len(rows), vocab_size)
            expected = [choose(line.numpy(), bench.requests[row]).token for line, row in zip(logits, rows, strict=True)]
            assert bench.step(logits, rows).token_ids == expected


def test_sampler_penalties_long_row_does_not_affect_short_row() -> None:
    sampling = Sampling(seed=0, temperature=0.0, repetition_penalty=2.0)
    bench = Bench(300)
    bench.start(0, Request(sampling, [5], []))
    bench.start(1, Request(sampling, list(range(200)), []))
    logits = torch.zeros((2, 300))
    logits[:, [0, 299]] = torch.tensor([1.0, 0.8])
    assert bench.sample(logits, [0, 1]).token_ids == [0, 299]


def test_sampler_penalties_entries_are_reused() -> None:
    bench = Bench(10)
    for round_ in range(20):
        for row in range(3):
            bench.start(row, Request(Sampling(seed=round_, presence_penalty=1.0), [1], [2]))
        bench.state.free_row(round_ % 3)
    assert bench.state.penalties.num_entries <= 4


def test_sampler_freed_row_leaves_no_state() -> None:
    everything = Sampling(
        seed=1,
        temperature=2.0,
        top_k=2,
        presence_penalty=2.0,
        repetition_penalty=2.0,
        logit_bias={0: 50.0},
        allowed_token_ids=(0, 1),
        bad_words=((0,), (2, 3)),
        min_tokens=50,
        suppressed_token_ids=(3,),
        logprobs=2,
        logprob_token_ids=(1,),
    )
    plain = Sampling(seed=1, temperature=0.0)
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    bench = Bench(4, num_rows=2)
    bench.start(1, Request(everything, [3, 3], [2, 3]))
    bench.step(logits, [1])
    for row in (0, 1):
        bench.state.free_row(1)
        bench.start(row, Request(plain, [3], [2]))
        sampled = bench.sample(logits, [row])
        assert (sampled.token_ids, sampled.logprobs, sampled.failures) == ([3], {}, [])


def test_sampler_preempted_row_continues_with_equal_tokens() -> None:
    rng = np.random.default_rng(8)
    bench, fresh = Bench(40), Bench(40)
    for row in range(12):
        bench.start(row, random_request(rng, 40))
    rows = list(range(12))
    for _ in range(5):
        bench.step(random_logits(rng, 12, 40), rows)
        rows = [row for row in rows if bench.requests[row].generated]
    for row, request in bench.requests.items():
        fresh.start(11 - row, request)
    logits = random_logits(rng, 12, 40)
    before, after = bench.sample(logits, list(range(12))), fresh.sample(logits, list(range(11, -1, -1)))
    assert before.token_ids == after.token_ids
    assert [11 - failure.row for failure in before.failures] == [failure.row for failure in after.failures]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sampling", [Sampling(seed=4, temperature=0.0), Sampling(seed=4, top_p=0.9, logprobs=2)])
def test_sampler_row_without_finite_logits_fails_alone(bad: float, sampling: Sampling) -> None:
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 4, 50)
    bench = Bench(50)
    for row in range(4):
        bench.start(row, Request(sampling, [row], []))
    healthy = bench.sample(logits, [0, 1, 2, 3])
    if bad == -torch.inf:
        logits[2] = bad
    else:
        logits[2, 17] = bad
    sampled = bench.sample(logits, [0, 1, 2, 3])
    assert sampled.rows == [0, 1, 3]
    assert sampled.token_ids == [healthy.token_ids[line] for line in (0, 1, 3)]
    assert sampled.logprobs == {row: healthy.logprobs[row] for row in (0, 1, 3) if row in healthy.logprobs}
    ((row, message),) = [(failure.row, failure.message) for failure in sampled.failures]
    assert row == 2 and "no finite logits" in message


def test_sampler_nan_at_forbidden_token_fails() -> None:
    sampling = Sampling(seed=0, temperature=0.0, allowed_token_ids=(1,))
    (failure,) = sample_one(torch.tensor([torch.nan, 1.0, 0.0]), sampling).failures
    assert "no finite logits" in failure.message and not failure.is_user_error


def test_sampler_row_without_allowed_token_fails_alone() -> None:
    bench = Bench(4)
    bench.start(5, Request(Sampling(seed=0, allowed_token_ids=(1, 2), bad_words=((1,), (2,)), logprobs=1), [0], []))
    bench.start(2, Request(Sampling(seed=0, temperature=0.0, allowed_token_ids=(1, 2), bad_words=((1,),)), [0], []))
    sampled = bench.sample(torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2), [5, 2])
    assert (sampled.rows, sampled.token_ids, sampled.logprobs) == ([2], [2], {})
    (failure,) = sampled.failures
    assert failure.row == 5 and "no token is left" in failure.message and failure.is_user_error


def test_sampler_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((300,), -torch.inf)
    logits[7] = -3.0
    for restriction in ({}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 280}):
        assert token_of(logits, Sampling(seed=0, **restriction)) == 7
