"""The report of `scripts/chaos.py`: the figures, the violations, and the waits of streams for their next tokens."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos_faults import Fault
from chaos_load import ChaosOutcome
from chaos_trainer import TrainerReport

from eagleray_bench.figures import summarize

SHOWN = 10
"""Number of violations of a kind that the report shows."""

HIT_FACTOR, HIT_SECONDS = 5.0, 0.02
"""A stream counts as hit by a fault if its pause around it is this many times the usual one, at least this long, and
mostly after the fault: a stream that had paused before was waiting for something else."""


@dataclass
class ChaosReport:
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    blows: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    control_calls: dict[str, int] = field(default_factory=dict)
    resent: int = 0
    """Number of times that a request was sent again because its own API server exited."""
    failures: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    next_token: dict[str, dict[str, float]] = field(default_factory=dict)
    """Milliseconds from a fault of an engine or its host to the next token of a stream that it served."""
    leaks: dict[str, list[str]] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    """Other violations."""
    trainer: TrainerReport | None = None
    answers_of_several_versions: int = 0

    @property
    def is_good(self) -> bool:
        return not (self.failures or self.mismatches or self.trouble or any(self.leaks.values()))


def wait_percentiles(outcomes: Sequence[ChaosOutcome], faults: Sequence[Fault]) -> dict[str, float]:
    """Return percentiles of the milliseconds from these faults to the next tokens of the streams that they hit."""
    waits = [
        wait
        for outcome in outcomes
        if outcome.answer is not None
        for choice in outcome.answer.choices.values()
        for fault in faults
        if (wait := _wait(choice.arrivals, fault.when)) is not None
    ]
    if (found := summarize(waits, scale=1000)) is None:
        return {"streams": 0}
    return {
        "streams": found.count,
        "p50": round(found.p50, 1),
        "p99": round(found.p99, 1),
        "max": round(found.highest, 1),
    }


def _wait(arrivals: Sequence[float], when: float) -> float | None:
    """Return the seconds that a stream waited for its next token at that time; None if it was not running or not hit.

    Clients do not see which engine serves a stream: one that continued as usual was served by another engine.
    """
    after = bisect_right(arrivals, when)
    if not 0 < after < len(arrivals):
        return None
    usual = statistics.median(b - a for a, b in itertools.pairwise(arrivals))
    pause = arrivals[after] - arrivals[after - 1]
    wait = arrivals[after] - when
    return wait if pause > max(HIT_FACTOR * usual, HIT_SECONDS) and wait > pause / 2 else None


def show_report(report: ChaosReport) -> str:
    """Return the report as lines for people."""
    lines = [
        f"requests                {report.requests} ({report.tokens} tokens in {report.seconds} s)",
        f"blows                   {_counts(report.blows)}",
        f"restarts                {report.restarts}",
        f"control calls           {_counts(report.control_calls)}",
        f"sent again by clients   {report.resent}, whose own API server had died",
        f"failures                {len(report.failures)}",
        f"mismatches              {len(report.mismatches)}",
        *([] if report.trainer is None else _show_trainer(report, report.trainer)),
        *(f"next token after {label}, ms: {_pairs(values)}" for label, values in report.next_token.items()),
        *(f"left behind: {what:<19}{len(left)} {', '.join(left)}" for what, left in report.leaks.items()),
    ]
    for title, found in (("failure", report.failures), ("mismatch", report.mismatches), ("trouble", report.trouble)):
        lines += [f"{title}: {what}" for what in found[:SHOWN]]
    return "\n".join([*lines, "good" if report.is_good else "NOT GOOD"])


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {what}" for what, count in sorted(counts.items())) or "none"


def _show_trainer(report: ChaosReport, trainer: TrainerReport) -> list[str]:
    return [
        f"weight updates          {trainer.committed} committed in {trainer.attempts} attempts, {trainer.paused} in a "
        f"pause, {trainer.left_open} left open",
        f"longest call            {trainer.longest_call:g} s ({trainer.longest_call_name})",
        f"of several versions     {report.answers_of_several_versions} answers",
        *(f"failed call: {cause:<42} {number}" for cause, number in trainer.causes.items()),
    ]


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
