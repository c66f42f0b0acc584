"""The kernel of random draws draws what plain torch does, and what exact arithmetic says."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from eagleray.kernels.cpu.ranking import NativeRanking
from eagleray.kernels.ranking import DRAW_ONE_BITS, Draws, Ranking
from eagleray.worker.random_sampler import DrawSettings, RandomSampler


def draws_of(n: int, seed: int) -> Draws:
    """Draws of every other row of 2 n."""
    random = np.random.default_rng(seed)
    temperature = random.uniform(0.3, 2, n).astype(np.float32)
    min_p = np.where(np.arange(n) % 3 == 0, 0.02, 0.0)
    least_weights = np.ceil(min_p * 2**DRAW_ONE_BITS).astype(np.int64)
    return Draws(np.arange(n) * 2 + 1, temperature, random.random(n), least_weights)


def draw(library: ctypes.CDLL, logits: Tensor, draws: Draws, threads: int) -> Tensor:
    out = torch.full((len(logits),), -1)
    ranking = NativeRanking(library, num_threads=threads)
    assert ranking.draw(logits, logits.amax(dim=1), draws, out=out)
    return out


def expected(logits: Tensor, draws: Draws) -> Tensor:
    n, size = logits.shape
    min_p = draws.least_weights / 2**DRAW_ONE_BITS
    all_tokens = np.full(len(draws.rows), size), np.ones(len(draws.rows))
    settings = DrawSettings(draws.uniforms, draws.temperature, min_p, *all_tokens)
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


def test_native_draw_large_vocabulary_equals_plain_torch(library: ctypes.CDLL) -> None:
    logits, draws = logits_of(8, 151936), draws_of(4, 1)
    assert torch.equal(draw(library, logits, draws, 2), expected(logits, draws))


def test_native_draw_older_processor_equals_plain_torch(other_library: ctypes.CDLL) -> None:
    logits, draws = logits_of(40, 1000), draws_of(20, 7)
    assert torch.equal(draw(other_library, logits, draws, 2), expected(logits, draws))


def test_native_draw_ends_of_the_unit_interval_are_the_first_and_the_last_token(library: ctypes.CDLL) -> None:
    for size in (1, 255, 256, 257, 70_000):
        logits = torch.full((2, size), -torch.inf)
        logits[:, [0, -1]] = 3.0
        ends = Draws(np.arange(2), np.ones(2, np.float32), np.array([2.0**-53, 1 - 2.0**-53]), np.zeros(2, np.int64))
        assert draw(library, logits, ends, 2).tolist() == [0, size - 1]


def test_native_draw_likeliest_token_is_left_by_a_min_p_of_one(library: ctypes.CDLL) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.9999999]])
    most = np.array([2**DRAW_ONE_BITS])
    assert draw(library, logits, Draws(np.zeros(1, np.int64), np.ones(1, np.float32), np.array([0.1]), most), 1)[0] == 1
