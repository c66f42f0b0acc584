"""Effects of an attack on other clients: figures, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fuzzing.arena import Arena
from fuzzing.canary import Notes

MEGABYTE = 2**20
SHOWN = 8


@dataclass(frozen=True)
class Limits:
    """Largest effects on another client that are accepted."""

    gap_seconds: float = 1.0
    live_seconds: float = 0.5
    growth_bytes: int = 300 * MEGABYTE
    left_bytes: int = 64 * MEGABYTE


@dataclass
class AttackOutcome:
    """Figures of one attack. `violations` is empty if it had no effect on others."""

    name: str
    seconds: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    gap: float = 0.0
    wait: float = 0.0
    """Longest time that a new stream of the canary waited for its first token."""
    turned_away: int = 0
    live: float = 0.0
    late: float = 0.0
    """Longest delay of the canary itself, on a busy machine."""
    growth: int = 0
    left: int = 0
    violations: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def judge(outcome: AttackOutcome, arena: Arena, notes: Notes, limits: Limits, *, seconds: float) -> None:
    """Fill in the canary's observations from the start of the attack until its end, `seconds` later."""
    outcome.seconds = round(seconds, 1)
    outcome.statuses = dict(arena.statuses)
    outcome.refusals = [f"{count} x {text}" for text, count in arena.refusals.most_common(SHOWN)]
    outcome.gap = _most(notes.gaps)
    outcome.wait = _most(notes.first_tokens)
    outcome.turned_away = len(notes.turned_away)
    outcome.live = max((seconds for _, seconds, _ in notes.live), default=0.0)
    outcome.late = _most(notes.late)
    memory = [size for _, size in notes.memory]
    if memory:
        outcome.growth, outcome.left = max(memory) - memory[0], memory[-1] - memory[0]
    outcome.violations += arena.findings
    outcome.violations += list(_violations(outcome, notes, limits))


def _violations(outcome: AttackOutcome, notes: Notes, limits: Limits) -> Sequence[str]:
    found = []
    if outcome.gap > limits.gap_seconds:
        count = sum(gap > limits.gap_seconds for _, gap in notes.gaps)
        found.append(f"another client's stream paused for {outcome.gap:.2f} s ({count} pauses too long)")
    if outcome.live > limits.live_seconds:
        count = sum(seconds > limits.live_seconds for _, seconds, _ in notes.live)
        found.append(f"/live took {outcome.live:.2f} s ({count} of {len(notes.live)} too long)")
    found += [f"/live failed: {trouble}" for _, _, trouble in notes.live if trouble][:3]
    found += [f"another client's stream: {trouble}" for _, trouble in notes.troubles][:3]
    if outcome.growth > limits.growth_bytes:
        found.append(f"resident memory grew by {outcome.growth / MEGABYTE:.0f} MB")
    if outcome.left > limits.left_bytes:
        found.append(f"{outcome.left / MEGABYTE:.0f} MB more are resident after it than before")
    if len(notes.pids) > 1:
        found.append(f"processes have died or begun: {' -> '.join(str(list(pids)) for _, pids in notes.pids[:4])}")
    if found and outcome.late > limits.live_seconds / 2:
        found.append(f"(the canary itself was late by up to {outcome.late:.2f} s: the machine was busy)")
    return found


def _most(pairs: Sequence[tuple[float, float]]) -> float:
    return round(max((value for _, value in pairs), default=0.0), 3)


def table(outcomes: Sequence[AttackOutcome]) -> str:
    """Return a table with a line for each attack."""
    lines = [f"{'attack':<38}{'s':>6}{'gap s':>8}{'/live s':>9}{'wait s':>8}{'+MB':>6}{'left':>6}  answers"]
    for one in outcomes:
        statuses = " ".join(f"{status}:{count}" for status, count in sorted(one.statuses.items()))
        mark = "  <-- BAD" if one.violations else ""
        lines.append(
            f"{one.name:<38}{one.seconds:>6.1f}{one.gap:>8.2f}{one.live:>9.2f}{one.wait:>8.2f}"
            f"{one.growth / MEGABYTE:>6.0f}{one.left / MEGABYTE:>6.0f}  {statuses}{mark}"
        )
    return "\n".join(lines)
