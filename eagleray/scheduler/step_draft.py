"""A step: while it is being decided, and from then until its result is applied."""

from __future__ import annotations

from dataclasses import dataclass, field

from eagleray.messages.steps import NewRow
from eagleray.scheduler.request import Run


@dataclass(slots=True)
class StepDraft:
    """What the next step will compute, within `budget` more tokens."""

    budget: int
    num_tokens: dict[Run, int] = field(default_factory=dict)
    grown: dict[Run, list[int]] = field(default_factory=dict)
    starts: dict[Run, NewRow] = field(default_factory=dict)
    is_short_of_blocks: bool = False
    """A running request did not get its blocks, or got them from another one: not the time to start more."""

    def add(self, run: Run, num_tokens: int) -> None:
        self.num_tokens[run] = num_tokens
        self.budget -= num_tokens

    def drop(self, run: Run) -> None:
        """The run is over before the step began."""
        self.budget += self.num_tokens.pop(run, 0)
        self.grown.pop(run, None)
        self.starts.pop(run, None)


@dataclass(slots=True)
class InFlightStep:
    """A step that was planned and not applied yet."""

    step: int
    runs: dict[Run, int] = field(default_factory=dict)
    """How many tokens of each it computes."""
    block_tables: list[list[int]] = field(default_factory=list)
    """Block tables of runs that are over, but that this step still reads and writes: given up when it is applied."""
