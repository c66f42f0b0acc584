"""The rows of the workers' table and who runs in them. Owned by the scheduler."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from eagleray.scheduler.request import Request, Run


class RowTable:
    """Running requests, in the order of their start."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._runs: dict[int, Run] = {}
        self._free = list(range(num_rows))  # a heap: low rows first
        self._ended: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def start(
        self, request: Request, *, block_ids: list[int], num_cached_tokens: int, num_cached_blocks: int, step: int
    ) -> Run:
        """A free row for this request, from `step` on."""
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

    def end(self, run: Run) -> None:
        """The run is over, its row is free."""
        del self._runs[run.row]
        run.request.run = None
        heapq.heappush(self._free, run.row)
        self._ended[run.row] = None

    def pop_freed_rows(self) -> list[int]:
        """Rows whose run is over, since the last call."""
        ended, self._ended = list(self._ended), {}
        return ended

    def end_all(self) -> None:
        """Whatever workers have in any of their rows, it is to be ended; the runs go on."""
        self._ended = dict.fromkeys(range(self._num_rows))

    def least_urgent(self) -> Run:
        """Of the runs with the highest priority number, the newest."""
        return max(reversed(self._runs.values()), key=lambda run: run.request.priority)
