from __future__ import annotations

import numpy as np
import pytest
import torch

from eagleray.kernels.ranking import Ranking
from eagleray.worker.random_sampler import DrawSettings, RandomSampler

LEAST, MOST = 2.0**-53, 1 - 2.0**-53
"""The ends of what a uniform number can be."""


def draw(logits: torch.Tensor, uniforms: list[float], *, top_k: int | None = None, top_p: float = 1.0) -> list[int]:
    """A token for each uniform number, all from the same logits [vocab_size]."""
    n, vocab_size = len(uniforms), len(logits)
    settings = DrawSettings(
        uniforms=np.array(uniforms),
        temperature=np.ones(n, dtype=np.float32),
        min_p=np.zeros(n),
        top_k=np.full(n, top_k or vocab_size),
        top_p=np.full(n, top_p),
    )
    drawn = torch.full((n,), -1)
    drawer = RandomSampler(max_rows=n, vocab_size=vocab_size, device=torch.device("cpu"), ranking=Ranking())
    drawer.draw(logits.repeat(n, 1), logits.max().repeat(n), np.arange(n), settings, out=drawn)
    return drawn.tolist()


@pytest.mark.parametrize("vocab_size", [4, 255, 256, 257, 900])
@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_the_ends_of_the_uniform_range_pick_the_first_and_the_last_token_that_can_be_drawn(
    vocab_size: int, top_p: float
) -> None:
    for first, last in ((0, vocab_size - 1), (1, vocab_size - 2), (2, 2), (vocab_size // 2, vocab_size // 2)):
        logits = torch.full((vocab_size,), -torch.inf)
        logits[[first, last]] = 1.0
        assert draw(logits, [LEAST, MOST], top_p=top_p) == [first, last]


def test_a_token_has_the_interval_of_the_unit_line_that_its_id_says() -> None:
    logits = torch.tensor([0.125, 0.5, 0.25, 0.125]).log()
    ends = [0.125, 0.625, 0.875]
    uniforms = [end + offset for end in ends for offset in (-1e-6, 1e-6)]
    assert draw(logits, uniforms) == [0, 1, 1, 2, 2, 3]
    assert draw(logits, [0.6666, 0.6667], top_k=2) == [1, 2]


def test_lines_that_are_not_drawn_for_are_left_alone() -> None:
    settings = DrawSettings(np.array([0.5]), np.ones(1, dtype=np.float32), np.zeros(1), np.array([5]), np.array([1.0]))
    drawn = torch.tensor([7, 8, 9])
    logits = torch.eye(5)[[4, 3, 2]] * 100
    RandomSampler(max_rows=3, vocab_size=5, device=torch.device("cpu"), ranking=Ranking()).draw(
        logits, logits.amax(1), np.array([1]), settings, out=drawn
    )
    assert drawn.tolist() == [7, 3, 9]
