"""Brings sampled tokens from the rank that samples to those that go on computing with them, the first stage's.

Every rank calls `share` after a step with the same rows. With one stage, the sampler's group is the first stage: tokens
are broadcast at once. With more, they travel while the first stage computes other rows, and it asks for them, in the
order in which they were sampled, when a step needs one of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from eagleray.parallel.groups import Groups
from eagleray.worker.input_batch import InputBatch, IntArray


@dataclass(frozen=True, slots=True)
class _OnTheWay:
    """Tokens of one step that this rank knows of, but does not know."""

    rows: IntArray
    positions: IntArray
    generations: IntArray


class TokenRelay:
    """Owned by the runner; writes the tokens into its rows."""

    def __init__(self, groups: Groups, rows: InputBatch) -> None:
        self._groups = groups
        self._rows = rows
        self._on_the_way: deque[_OnTheWay] = deque()

    def share(self, rows: IntArray, token_ids: IntArray | None) -> None:
        """Each of `rows` [n] has sampled a token. `token_ids`: int64 [n] on the rank that samples, None elsewhere."""
        mesh = self._groups.mesh
        if mesh.pp_size == 1:
            self._rows.append(rows, self._broadcast(len(rows), token_ids))
        elif token_ids is not None:
            assert self._groups.stages is not None
            self._groups.stages.send_tokens(torch.from_numpy(token_ids))
            self._rows.append(rows, token_ids)
        else:
            positions = self._rows.num_tokens[rows].copy()
            if mesh.is_first_stage:
                self._on_the_way.append(_OnTheWay(rows, positions, self._rows.generation[rows].copy()))
                if len(self._on_the_way) > 2 * mesh.pp_size:  # long sampled, and nobody asks: requests of one token
                    self._arrive(self._on_the_way.popleft())
            self._rows.num_tokens[rows] = positions + 1

    def catch_up(self, rows: IntArray) -> None:
        """The next step computes `rows`: wait for the tokens of theirs that are on the way."""
        for _ in range(self._num_awaited(rows)):
            self._arrive(self._on_the_way.popleft())

    def _num_awaited(self, rows: IntArray) -> int:
        """How many of the steps on the way must arrive: all up to the last one that has a token of these rows."""
        for count in range(len(self._on_the_way), 0, -1):
            step = self._on_the_way[count - 1]
            if np.any(self._is_current(step) & np.isin(step.rows, rows)):
                return count
        return 0

    def _arrive(self, step: _OnTheWay) -> None:
        count = len(step.rows)
        received = None
        if self._groups.mesh.rank == 0:
            assert self._groups.stages is not None
            received = self._groups.stages.receive_tokens(count).numpy()
        token_ids = self._broadcast(count, received)
        current = self._is_current(step)
        self._rows.token_ids[step.rows[current], step.positions[current]] = token_ids[current]

    def _broadcast(self, count: int, token_ids: IntArray | None) -> IntArray:
        """Within the tensor-parallel group, from its first rank."""
        mine = torch.empty(count, dtype=torch.int64) if token_ids is None else torch.from_numpy(token_ids)
        return self._groups.tp.broadcast(mine).numpy()

    def _is_current(self, step: _OnTheWay) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of its rows still belong to the request that sampled."""
        return self._rows.generation[step.rows] == step.generations
