"""A step while it is being planned, and from then on until its result is applied."""

from __future__ import annotations

from dataclasses import dataclass, field

from eagleray.messages.steps import NewRow
from eagleray.scheduler.request import Run


@dataclass(slots=True)
class StepDraft:
    """Content of the next step so far, with `budget` tokens left."""

    budget: int
    num_tokens: dict[Run, int] = field(default_factory=dict)
    new_blocks: dict[Run, list[int]] = field(default_factory=dict)
    new_rows: dict[Run, NewRow] = field(default_factory=dict)
    is_short_of_blocks: bool = False
    """Whether a running request did not get its blocks or got them by a preemption; no request is admitted then."""

    def add(self, run: Run, num_tokens: int) -> None:
        self.num_tokens[run] = num_tokens
        self.budget -= num_tokens

    def drop(self, run: Run) -> None:
        """Remove a run that ended before the step was sent."""
        self.budget += self.num_tokens.pop(run, 0)
        self.new_blocks.pop(run, None)
        self.new_rows.pop(run, None)


@dataclass(slots=True)
class InFlightStep:
    """A step that is planned and not applied yet."""

    step: int
    runs: dict[Run, int] = field(default_factory=dict)
    """Runs of the step and the number of tokens that it computes of each."""
    block_tables: list[list[int]] = field(default_factory=list)
    """Block tables of ended runs that this step still reads and writes; released when the step is applied."""
