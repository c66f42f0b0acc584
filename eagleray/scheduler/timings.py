"""Totals of a scheduler, times of its requests, and the histograms that they are counted in.

Owned by the scheduler, which reports every event of a request here. Requests keep their own times.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from eagleray.messages.distributions import BOUNDS, Distribution, EngineDistributions


@dataclass(slots=True)
class Counters:
    """Totals, which only grow. `SchedulerStats` documents each field."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_grammar_queries: int = 0
    num_grammar_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class RequestTimes:
    """Times of a request by `time.monotonic`, and the number of its preemptions."""

    arrived_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    """Time of the first admission."""
    first_token_at: float | None = None
    num_preemptions: int = 0

    def until_now(self) -> dict[str, float]:
        """Return the fields of a chunk with the first output, which is made now."""
        admitted_at = _admitted(self)
        return {"queue_time": admitted_at - self.arrived_at, "prefill_time": time.monotonic() - admitted_at}


class EngineHistograms:
    """Counts of every histogram of `EngineDistributions`."""

    def __init__(self) -> None:
        self._histograms = {name: _Histogram(bounds) for name, bounds in BOUNDS.items()}

    def on_step(self, num_tokens: int) -> None:
        """Count a step that has computed tokens."""
        if num_tokens:
            self._histograms["step_tokens"].add(num_tokens)

    def on_masks(self, seconds: float) -> None:
        """Count the time for the masks of a step, if it had any."""
        if seconds:
            self._histograms["mask_time"].add(seconds)

    def on_admitted(self, times: RequestTimes, num_tokens: int) -> None:
        """Record the first admission of a request, and the number of its prompt's tokens that are to be computed."""
        self._histograms["prefill_tokens"].add(num_tokens)
        times.admitted_at = time.monotonic()
        self._histograms["queue_time"].add(times.admitted_at - times.arrived_at)

    def on_first_token(self, times: RequestTimes) -> None:
        """Record the first token of an admitted request."""
        times.first_token_at = time.monotonic()
        self._histograms["prefill_time"].add(times.first_token_at - _admitted(times))

    def on_grammar_compiled(self, seconds: float) -> None:
        """Record the time after which a grammar was compiled, or refused."""
        self._histograms["grammar_time"].add(seconds)

    def on_ended(self, times: RequestTimes) -> None:
        """Record the end of a request, which counts if it was admitted."""
        if times.admitted_at is None:
            return
        now = time.monotonic()
        self._histograms["inference_time"].add(now - times.admitted_at)
        self._histograms["preemptions"].add(times.num_preemptions)
        if times.first_token_at is not None:
            self._histograms["decode_time"].add(now - times.first_token_at)

    def report(self) -> EngineDistributions:
        """Return a copy of all counts."""
        return EngineDistributions(**{name: each.report() for name, each in self._histograms.items()})


class _Histogram:
    """Counts of values by ascending upper bounds, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def report(self) -> Distribution:
        return Distribution(list(self._counts), self._total)


def _admitted(times: RequestTimes) -> float:
    assert times.admitted_at is not None, "a request has tokens after its admission only"
    return times.admitted_at
