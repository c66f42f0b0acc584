"""Transfer of sampled tokens from the rank that samples to the ranks that compute with them next, the first stage's.

Every rank calls `share` after a step with the same rows. With one stage, the sampler's group is the first stage, and
tokens are broadcast at once. With more stages, tokens travel while the first stage computes other rows; it receives
them, in the order in which they were sampled, when a step needs one of them. If all ranks of the last stage sample, the
first one sends.

Owned and driven by the runner of a worker that does not sample all tokens itself.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from eagleray.parallel.groups import Groups
from eagleray.worker.input_batch import ExpectedTokens, InputBatch, IntArray


class TokenRelay:
    """Writes the tokens into the runner's rows."""

    def __init__(self, groups: Groups, rows: InputBatch) -> None:
        self._groups = groups
        self._rows = rows
        self._in_flight: deque[ExpectedTokens] = deque()

    def share(self, expected: ExpectedTokens, token_ids: IntArray | None) -> None:
        """Make the tokens [n] of a step known to the ranks that need them. `token_ids`: int64 [n] on ranks that sample,
        None on others."""
        mesh = self._groups.mesh
        if not len(expected.rows):
            return  # all rows have drafts: the next plan that computes a row has its tokens
        if mesh.pp_size == 1:
            self._rows.set_tokens(expected, self._broadcast(len(expected.rows), token_ids))
        elif token_ids is not None:
            if mesh.is_sampler:
                assert self._groups.stages is not None
                self._groups.stages.send_tokens(torch.from_numpy(token_ids))
            self._rows.set_tokens(expected, token_ids)
        elif mesh.is_first_stage:
            self._in_flight.append(expected)
            # Nobody waits for the tokens of rows whose request has ended, so the oldest steps are received here.
            if len(self._in_flight) > 2 * mesh.pp_size:
                self._receive(self._in_flight.popleft())

    def catch_up(self, rows: IntArray) -> None:
        """Wait for the tokens in flight that belong to `rows`, which the next step computes."""
        for _ in range(self._num_needed(rows)):
            self._receive(self._in_flight.popleft())

    def _num_needed(self, rows: IntArray) -> int:
        """Return the number of steps in flight that must be received: all up to the last one with a token of these
        rows."""
        for count in range(len(self._in_flight), 0, -1):
            expected = self._in_flight[count - 1]
            if np.any(self._rows.is_current(expected) & np.isin(expected.rows, rows)):
                return count
        return 0

    def _receive(self, expected: ExpectedTokens) -> None:
        count = len(expected.rows)
        received = None
        if self._groups.mesh.rank == 0:
            assert self._groups.stages is not None
            received = self._groups.stages.receive_tokens(count).numpy()
        self._rows.set_tokens(expected, self._broadcast(count, received))

    def _broadcast(self, count: int, token_ids: IntArray | None) -> IntArray:
        """Broadcast tokens within the tensor-parallel group, from its first rank."""
        mine = torch.empty(count, dtype=torch.int64) if token_ids is None else torch.from_numpy(token_ids)
        return self._groups.tp.broadcast(mine).numpy()
