"""The kernel of random draws draws what plain torch does, and what exact arithmetic says."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from eagleray.kernels.cpu.ranking import NativeRanking
from eagleray.kernels.ranking import DRAW_ONE_BITS, Draws, Ranking
from eagleray.worker.random_sampler import DrawSettings, RandomSampler

ALL_TOKENS = 2**20
"""A top_k that restricts no draw of these tests."""


def draws_of(n: int, seed: int, *, top_k: int = ALL_TOKENS, top_p: float = 1.0) -> Draws:
    """Draws of every other row of 2 n."""
    random = np.random.default_rng(seed)
    temperature = random.uniform(0.3, 2, n).astype(np.float32)
    min_p = np.where(np.arange(n) % 3 == 0, 0.02, 0.0)
    least_weights = np.ceil(min_p * 2**DRAW_ONE_BITS).astype(np.int64)
    uniforms = random.random(n)
    return Draws(np.arange(n) * 2 + 1, temperature, uniforms, least_weights, np.full(n, top_k), np.full(n, top_p))


def mixed_draws_of(n: int, size: int) -> Draws:
    """As `draws_of`, with any top_k and top_p. A third of the rows have none, or only one of them."""
    random = np.random.default_rng(size)
    top_k = random.choice([1, 2, 20, 64, 255, 256, 257, 700, ALL_TOKENS, ALL_TOKENS], n)
    top_p = random.choice([1e-300, 1e-9, 0.3, 0.8, 0.95, 0.9999999, 1.0, 1.0], n)
    return draws_of(n, size)._replace(top_k=top_k, top_p=top_p)


def draws_at(uniforms: npt.ArrayLike, *, top_k: int = ALL_TOKENS, top_p: float = 1.0, least_weight: int = 0) -> Draws:
    """A draw of each row by these numbers, with a temperature of 1."""
    n = len(np.asarray(uniforms))
    least_weights, temperature = np.full(n, least_weight), np.ones(n, np.float32)
    return Draws(np.arange(n), temperature, np.array(uniforms), least_weights, np.full(n, top_k), np.full(n, top_p))


def draw(library: ctypes.CDLL, logits: Tensor, draws: Draws, threads: int) -> Tensor:
    out = torch.full((len(logits),), -1)
    ranking = NativeRanking(library, num_threads=threads)
    assert ranking.draw(logits, logits.amax(dim=1), draws, out=out)
    return out


def expected(logits: Tensor, draws: Draws) -> Tensor:
    n, size = logits.shape
    min_p = draws.least_weights / 2**DRAW_ONE_BITS
    top_k = np.minimum(draws.top_k, size)
    settings = DrawSettings(draws.uniforms, draws.temperature, min_p, top_k, draws.top_p)
    sampler = RandomSampler(max_rows=n, vocab_size=size, device=torch.device("cpu"), ranking=Ranking())
    out = torch.full((n,), -1)
    sampler.draw(logits, logits.amax(dim=1), draws.rows, settings, out=out)
    return out


def logits_of(n: int, size: int) -> Tensor:
    """Rows of any spread; a third of them have forbidden tokens."""
    torch.manual_seed(size)
    logits = torch.randn(n, size) * torch.rand(n, 1) * 10
    logits[::3] = logits[::3].masked_fill(torch.rand(len(logits[::3]), size) < 0.5, -torch.inf)
    logits[:, size // 2] = 0
    return logits


@pytest.mark.parametrize("size", [1, 5, 16, 37, 255, 256, 257, 4096, 4097, 9001])
def test_native_draw_equals_plain_torch(library: ctypes.CDLL, size: int) -> None:
    logits, draws = logits_of(120, size), draws_of(60, size)
    for threads in (1, 2, 3):
        assert torch.equal(draw(library, logits, draws, threads), expected(logits, draws))


@pytest.mark.parametrize("size", [1, 2, 37, 255, 256, 257, 4096, 9001])
def test_native_draw_top_k_and_top_p_equal_plain_torch(library: ctypes.CDLL, size: int) -> None:
    draws = mixed_draws_of(100, size)
    for logits in (logits_of(200, size), logits_of(200, size).round()):  # the latter with equal logits, also at the end
        drawn = expected(logits, draws)
        for threads in (1, 3):
            assert torch.equal(draw(library, logits, draws, threads), drawn)


def test_native_draw_large_vocabulary_equals_plain_torch(library: ctypes.CDLL) -> None:
    logits = logits_of(16, 151936)
    for draws in (draws_of(8, 1), mixed_draws_of(8, 2)):
        assert torch.equal(draw(library, logits, draws, 2), expected(logits, draws))


def test_native_draw_older_processor_equals_plain_torch(other_library: ctypes.CDLL) -> None:
    logits = logits_of(80, 1000)
    for draws in (draws_of(20, 7), mixed_draws_of(40, 1000)):
        assert torch.equal(draw(other_library, logits, draws, 2), expected(logits, draws))


EVERYWHERE = (np.arange(64) + 0.5) / 64
"""Uniform numbers of draws that together find every token with a part of 1/32 or more."""


def drawn_of(library: ctypes.CDLL, logits: Tensor, **settings: Any) -> set[int]:
    """Return the tokens that are drawn from logits [size]."""
    rows = logits.repeat(len(EVERYWHERE), 1)
    return set(draw(library, rows, draws_at(EVERYWHERE, **settings), 1).tolist())


@pytest.mark.parametrize("size", [9, 300, 5000])
def test_native_draw_keeps_the_first_of_equal_logits(library: ctypes.CDLL, size: int) -> None:
    logits = torch.full((size,), -torch.inf)
    logits[[0, 2, 4, 6, 8]] = torch.tensor([-0.0, 1.0, 0.0, 0.0, -0.0])
    assert drawn_of(library, logits, top_k=1, top_p=0.9) == {2}
    assert drawn_of(library, logits, top_k=3) == {0, 2, 4}
    assert drawn_of(library, logits, top_k=4, top_p=0.9999) == {0, 2, 4, 6}
    assert drawn_of(library, logits, top_k=257) == {0, 2, 4, 6, 8}
    assert drawn_of(library, logits, top_p=0.5) == {0, 2}  # of parts of e / (e + 4) = 0.405 and 0.149
    assert drawn_of(library, logits, top_p=1e-300) == {2}


@pytest.mark.parametrize(("size", "top_k"), [(8, ALL_TOKENS), (4096, 8), (4096, ALL_TOKENS), (4096, 300)])
def test_native_draw_top_p_at_a_boundary_keeps_the_token_that_reaches_it(
    library: ctypes.CDLL, size: int, top_k: int
) -> None:
    logits = torch.full((size,), -torch.inf)
    logits[:8] = 2.0  # 8 equal parts, whose sums are exact
    for count in range(1, 8):
        assert drawn_of(library, logits, top_k=top_k, top_p=count / 8) == set(range(count))
        assert drawn_of(library, logits, top_k=top_k, top_p=np.nextafter(count / 8, 1)) == set(range(count + 1))
    assert drawn_of(library, logits, top_k=top_k, top_p=np.nextafter(1, 0)) == set(range(8))


def test_native_draw_of_many_equal_tokens_ends_where_exact_arithmetic_says(library: ctypes.CDLL) -> None:
    size, ends = 10_000, [2.0**-53, 1 - 2.0**-53]
    logits = torch.zeros(2, size)
    for settings, kept in (({"top_k": 256}, 256), ({"top_k": 257}, 257), ({"top_p": 0.75}, 7500), ({}, size)):
        assert draw(library, logits, draws_at(ends, **settings), 2).tolist() == [0, kept - 1]
    assert draw(library, logits, draws_at(ends, top_k=1000, top_p=0.5), 2).tolist() == [0, 499]
    logits[:, 5000:] = -1e-3
    for top_k in (4999, 5000, 5001):  # the middle one ends with the last of the higher logits
        assert draw(library, logits, draws_at(ends, top_k=top_k), 2).tolist() == [0, top_k - 1]


def test_native_draw_ends_of_the_unit_interval_are_the_first_and_the_last_token(library: ctypes.CDLL) -> None:
    for size in (1, 255, 256, 257, 70_000):
        logits = torch.full((2, size), -torch.inf)
        logits[:, [0, -1]] = 3.0
        for settings in ({}, {"top_k": 2}, {"top_k": 300}, {"top_p": 0.9}):
            ends = draws_at([2.0**-53, 1 - 2.0**-53], **settings)
            assert draw(library, logits, ends, 2).tolist() == [0, size - 1]


def test_native_draw_likeliest_token_is_left_by_a_min_p_of_one(library: ctypes.CDLL) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.9999999]])
    for settings in ({}, {"top_k": 2}, {"top_p": 0.9}):
        assert draw(library, logits, draws_at([0.1], least_weight=2**DRAW_ONE_BITS, **settings), 1)[0] == 1
