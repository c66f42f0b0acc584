"""Running requests: the rows they occupy, and the steps that compute them. Owned by the scheduler."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from eagleray.messages.steps import NewRow, StepPlan, StepResult
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
            num_initial_tokens=len(request.token_ids),
            num_draft_cached=num_cached_tokens,
            wants_routed_experts=request.routed_experts_from is not None,
        )
        request.run = self._runs[run.row] = run
        return run

    def free(self, run: Run) -> None:
        """End a run and free its row."""
        run.steady_until = 0
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


@dataclass(slots=True)
class StepDraft:
    """Content of the next step so far, with `budget` tokens left."""

    budget: int
    num_tokens: dict[Run, int] = field(default_factory=dict)
    """Number of tokens of each run that the step computes, without drafts."""
    drafts: dict[Run, list[int]] = field(default_factory=dict)
    proposals: dict[Run, int] = field(default_factory=dict)
    """Most tokens that the draft model proposes for a run at the end of the step."""
    new_blocks: dict[Run, list[int]] = field(default_factory=dict)
    new_rows: dict[Run, NewRow] = field(default_factory=dict)
    settled_rows: list[tuple[int, list[int]]] = field(default_factory=list)
    """Tokens that the workers must know to compute the runs of the step, by row."""
    is_short_of_blocks: bool = False
    """Whether a running request did not get its blocks or got them by a preemption; no request is admitted then."""

    def add(self, run: Run, num_tokens: int, drafted: list[int] | None = None) -> None:
        self.num_tokens[run] = num_tokens
        self.budget -= num_tokens
        if drafted:
            self.drafts[run] = drafted
            self.budget -= len(drafted)

    def settle(self) -> None:
        """Note the drafts of the runs, and add the tokens by their drafts before, which the workers do not know yet."""
        for run, drafted in self.drafts.items():
            run.num_drafts = len(drafted)
            run.steady_until = 0
        for run in self.num_tokens:
            if run.settled_token_ids:
                self.settled_rows.append((run.row, run.settled_token_ids))
                run.settled_token_ids = []

    def make_plan(self, step: int, freed_rows: list[int], *, captures: bool) -> StepPlan:
        """Make the plan of the step with this number. `captures`: whether requests may want routed experts."""
        num_tokens = list(self.num_tokens.values())
        if self.drafts:
            num_tokens = [count + len(self.drafts.get(run, ())) for run, count in self.num_tokens.items()]
        capture_rows = []
        if captures:
            capture_rows = [run.row for run in self.num_tokens if run.wants_routed_experts]
        return StepPlan(
            step=step,
            freed_rows=freed_rows,
            new_rows=list(self.new_rows.values()),
            new_blocks=[(run.row, added) for run, added in self.new_blocks.items()],
            rows=[run.row for run in self.num_tokens],
            num_tokens=num_tokens,
            drafts={run.row: drafted for run, drafted in self.drafts.items()},
            settled_rows=self.settled_rows,
            proposals={run.row: count for run, count in self.proposals.items()},
            capture_rows=capture_rows,
        )

    def drop(self, run: Run) -> None:
        """Remove a run that ended before the step was sent."""
        drafted = self.drafts.pop(run, [])
        self.budget += self.num_tokens.pop(run, 0) + len(drafted)
        self.new_blocks.pop(run, None)
        self.new_rows.pop(run, None)


@dataclass(slots=True)
class InFlightStep:
    """A step that is planned and not applied yet."""

    step: int
    weight_version: str
    """Version of the weights that compute it."""
    runs: dict[Run, int] = field(default_factory=dict)
    """Runs of the step and the number of tokens that it computes of each, without drafts."""
    rows: list[int] = field(default_factory=list)
    """Rows of these runs, in the same order."""
    drafts: dict[Run, list[int]] = field(default_factory=dict)
    proposals: dict[Run, int] = field(default_factory=dict)
    """See `StepDraft`."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(self.runs.values()) + sum(map(len, self.drafts.values()))

    def token_ids_of(self, result: StepResult) -> Iterable[int | None]:
        """Return the first token that the step sampled in each of its rows, in their order, or None where it sampled
        none."""
        if result.rows == self.rows:  # nearly always
            return result.token_ids
        return map(dict(zip(result.rows, result.token_ids, strict=True)).get, self.rows)

    block_tables: list[list[int]] = field(default_factory=list)
    """Block tables of ended runs that this step still reads and writes; released when the step is applied."""
