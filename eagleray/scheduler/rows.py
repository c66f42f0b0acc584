"""Rows of the workers' table and the runs that occupy them. Owned by the scheduler."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from eagleray.scheduler.request import Request, Run


class RowTable:
    """Running requests, in the order of their admission."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._runs: dict[int, Run] = {}
        self._free = list(range(num_rows))  # heap: low rows first
        self._freed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def assign(
        self, request: Request, *, block_ids: list[int], num_cached_tokens: int, num_cached_blocks: int, step: int
    ) -> Run:
        """Assign a free row to this request; `step` is the first step that computes it."""
        run = Run(
            request=request,
            row=heapq.heappop(self._free),
            block_ids=block_ids,
            num_computed_tokens=num_cached_tokens,
            num_reported_tokens=num_cached_tokens,
            num_committed_blocks=num_cached_blocks,
            first_step=step,
        )
        request.run = self._runs[run.row] = run
        return run

    def free(self, run: Run) -> None:
        """End a run and free its row."""
        del self._runs[run.row]
        run.request.run = None
        heapq.heappush(self._free, run.row)
        self._freed[run.row] = None

    def pop_freed_rows(self) -> list[int]:
        """Return the rows that were freed since the last call."""
        freed, self._freed = list(self._freed), {}
        return freed

    def free_all_rows(self) -> None:
        """Have the next plan free all rows of the workers, whatever is in them. The runs continue."""
        self._freed = dict.fromkeys(range(self._num_rows))

    def least_urgent(self) -> Run:
        """Return the newest of the runs with the highest priority number."""
        return max(reversed(self._runs.values()), key=lambda run: run.request.priority)
