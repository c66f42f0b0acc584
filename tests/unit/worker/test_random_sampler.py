from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_oracle import splitmix_uniform

from eagleray.kernels.ranking import Ranking
from eagleray.worker.random_sampler import DrawSettings, RandomSampler, stream_of, uniform

LEAST, MOST = 2.0**-53, 1 - 2.0**-53
"""Limits of the range of uniform numbers."""


def draw(logits: torch.Tensor, uniforms: list[float], *, top_k: int | None = None, top_p: float = 1.0) -> list[int]:
    """Draw a token for each uniform number, all from the same logits [vocab_size]."""
    n, vocab_size = len(uniforms), len(logits)
    settings = DrawSettings(
        uniforms=np.array(uniforms),
        temperature=np.ones(n, dtype=np.float32),
        min_p=np.zeros(n),
        top_k=np.full(n, top_k or vocab_size),
        top_p=np.full(n, top_p),
    )
    drawn = torch.full((n,), -1)
    sampler = RandomSampler(max_rows=n, vocab_size=vocab_size, device=torch.device("cpu"), ranking=Ranking())
    sampler.draw(logits.repeat(n, 1), logits.max().repeat(n), np.arange(n), settings, out=drawn)
    return drawn.tolist()


@pytest.mark.parametrize("vocab_size", [4, 255, 256, 257, 900])
@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_random_sampler_ends_of_uniform_range_draw_first_and_last_token(vocab_size: int, top_p: float) -> None:
    for first, last in ((0, vocab_size - 1), (1, vocab_size - 2), (2, 2), (vocab_size // 2, vocab_size // 2)):
        logits = torch.full((vocab_size,), -torch.inf)
        logits[[first, last]] = 1.0
        assert draw(logits, [LEAST, MOST], top_p=top_p) == [first, last]


def test_random_sampler_token_has_unit_interval_in_order_of_ids() -> None:
    logits = torch.tensor([0.125, 0.5, 0.25, 0.125]).log()
    ends = [0.125, 0.625, 0.875]
    uniforms = [end + offset for end in ends for offset in (-1e-6, 1e-6)]
    assert draw(logits, uniforms) == [0, 1, 1, 2, 2, 3]
    assert draw(logits, [0.6666, 0.6667], top_k=2) == [1, 2]


def test_random_sampler_other_logits_are_left_alone() -> None:
    settings = DrawSettings(np.array([0.5]), np.ones(1, dtype=np.float32), np.zeros(1), np.array([5]), np.array([1.0]))
    drawn = torch.tensor([7, 8, 9])
    logits = torch.eye(5)[[4, 3, 2]] * 100
    RandomSampler(max_rows=3, vocab_size=5, device=torch.device("cpu"), ranking=Ranking()).draw(
        logits, logits.amax(1), np.array([1]), settings, out=drawn
    )
    assert drawn.tolist() == [7, 3, 9]


def test_uniform_equals_known_splitmix64_outputs() -> None:
    known = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    drawn = uniform(np.full(5, 1234567, dtype=np.uint64), np.arange(5))
    assert drawn.tolist() == [((output >> 12) + 0.5) / 2**52 for output in known]


def test_uniform_depends_on_seed_and_position_alone() -> None:
    seeds = [0, 1, -1, 42, 2**63 - 1, -(2**63) + 1]
    positions = [0, 1, 17, 40_000, 3, 2**31]
    streams = np.array([stream_of(seed) for seed in seeds], dtype=np.uint64)
    together = uniform(streams, np.array(positions)).tolist()
    assert together == [splitmix_uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]


def test_uniform_is_uniform_over_positions_and_over_seeds() -> None:
    one_seed = uniform(np.full(20_000, stream_of(5), dtype=np.uint64), np.arange(20_000))
    many_seeds = uniform(np.array([stream_of(seed) for seed in range(20_000)], dtype=np.uint64), np.full(20_000, 7))
    for numbers in (one_seed, many_seeds):
        assert numbers.min() > 0 and numbers.max() < 1
        counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
        assert ((counts - 400) ** 2 / 400).sum() < 90  # chi-square with 49 degrees of freedom: 1 in 3,000 is above
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
