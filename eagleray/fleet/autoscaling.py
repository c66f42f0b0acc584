"""The policy of the autoscaler: the number of engines that the load needs.

Pure: `AutoscalePolicy` takes reports of load with their times and returns a number of engines, or None.

Two needs are computed from every sample of the load. The *least need* counts engines without which the load is not
carried: it exceeds the number of engines when sequences wait, caches are full or first tokens come late. The
*comfortable need* leaves room in all of these, so it is never the smaller one. Engines are added when the least need
has exceeded their number for `UP_SECONDS`, all at once, as many as the smallest need of that time. Engines are removed
when the comfortable need has been smaller for `down_delay` seconds, down to the largest need of that time. Between the
two nothing happens, so a load that does not change soon leads to no further change.

The number of sequences does not show how much an engine can compute: one that computes 30 sequences may be busy by half
or entirely. So the policy remembers the tokens per second and engine at which the last queue appeared, and the
comfortable need does not exceed `COMFORTABLE_WORK` of that rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from eagleray.identity import ClientId, EngineId
from eagleray.messages.scaling import EngineLoadReport, LoadReport

UP_SECONDS = 5.0
"""Time for which the load must exceed the engines before some are added. Most engines admit a short burst by then."""

SETTLE_SECONDS = 10.0
"""Time after an addition in which the load is not judged, because the new engines get requests that arrive from now on
and the queues of the others take time to shrink."""

REPORT_LIMIT_SECONDS = 5.0
"""Age of a report from which on it does not count: its sender has exited or hangs."""

SAMPLE_SECONDS = 0.5
"""Least time between two samples. Several clients report once a second each."""

RATE_SECONDS = 30.0
"""Time over which tokens per second are measured for the comfortable need."""

CAPACITY_SECONDS = 6 * 3600.0
"""Time for which the rate at which a queue appeared is remembered. After it a different kind of requests may have made
it wrong, and forgetting it costs at most one unneeded change."""

FULL_CACHE = 0.9
"""Mean use of the caches above which engines are added: requests are about to wait for blocks, or to be preempted."""
NEEDED_CACHE = 0.75
"""Mean use of the caches that an addition leads to."""
COMFORTABLE_CACHE = 0.6
"""Mean use of the caches up to which engines are removed."""
COMFORTABLE_SEQS = 0.6
"""Running sequences, as a fraction of `max_num_seqs`, up to which engines are removed."""
COMFORTABLE_WORK = 0.8
"""Computed tokens, as a fraction of the rate at which a queue appeared, up to which engines are removed."""
COMFORTABLE_QUEUE = 0.5
"""Waiting sequences, as a fraction of the target, up to which engines are removed."""

LATE_FRACTION = 0.1
"""Fraction of first tokens that may come after the target: the target is one for the 90th percentile."""
COMFORTABLE_LATE_FRACTION = 0.05
GROWTH_FACTOR, GROWTH_ENGINES = 2, 4
"""Bounds of one addition: this multiple of the engines or this number more, whichever is larger. They are those of
Kubernetes' horizontal pod autoscaler."""

LATE_GROWTH = 0.25
"""Engines that late first tokens add, as a fraction of the engines: how many are needed cannot be computed."""

FIRST_BACKOFF_SECONDS = 30.0
"""Time without a decision after an operation has failed, for example because there is no room. Each failure in a row
doubles it."""
MAX_BACKOFF_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class AutoscaleSettings:
    """Limits and targets of the number of engines."""

    min_engines: int
    max_engines: int
    max_num_seqs: int
    """Most sequences that an engine computes together."""
    target_queue: float
    """Waiting sequences per engine above which engines are added."""
    down_delay: float
    """Seconds for which fewer engines must do before some are removed."""


class Decision(NamedTuple):
    """A change of the number of engines, and the reason for it."""

    num_engines: int
    reason: str


class _Need(NamedTuple):
    """A number of engines, and the load that needs them."""

    num_engines: int
    reason: str


class _Rates(NamedTuple):
    """Computed tokens per second and engine."""

    prompt: float
    generation: float

    def fraction_of(self, other: _Rates) -> float:
        """Return the larger of the two rates as a fraction of `other`. With another mix of prompts and generation this
        overestimates the work, so it errs on the side of more engines."""
        pairs = zip(self, other, strict=True)
        return max((mine / others for mine, others in pairs if others > 0), default=0.0)

    @staticmethod
    def of(before: EngineLoadReport, after: EngineLoadReport, seconds: float) -> _Rates:
        """Return the rates of an engine between two reports."""
        prompt = after.num_prompt_tokens - before.num_prompt_tokens
        return _Rates(prompt / seconds, (after.num_generation_tokens - before.num_generation_tokens) / seconds)


class _Sample(NamedTuple):
    """The load at one time."""

    time: float
    least: _Need
    comfortable: _Need
    prompt_tokens: int
    """Prompt tokens that all engines have computed until then."""
    generation_tokens: int


class AutoscalePolicy:
    """The caller passes in every report, and asks `decide` while no operation runs."""

    def __init__(self, settings: AutoscaleSettings) -> None:
        self.settings = settings
        self.reason = "no load has been reported yet"
        """The reason for the last decision, or for its absence."""
        self._reports: dict[ClientId, tuple[float, LoadReport]] = {}
        self._engines: dict[EngineId, EngineLoadReport] = {}
        self._samples: deque[_Sample] = deque()
        """Samples since the last change, at most as old as the longer window."""
        self._recent: deque[tuple[float, dict[EngineId, EngineLoadReport]]] = deque()
        """Loads of the engines in the last `UP_SECONDS`, with their times."""
        self._prompt_tokens = self._generation_tokens = 0
        self._first_tokens: deque[tuple[float, int, int]] = deque()
        """Times, numbers of first tokens, and how many of them came late, within `UP_SECONDS`."""
        self._capacity: tuple[float, _Rates] | None = None
        """Rates at which the last queue appeared, and the time until which they are remembered."""
        self._judged_from = -math.inf
        """Time from which on samples count."""
        self._blocked_until = -math.inf
        self._num_failures = 0

    # Input.

    def record(self, report: LoadReport, now: float) -> None:
        """Record what a client reports."""
        self._reports[report.client] = now, report
        for load in report.engines:
            former = self._engines.get(load.engine, load)
            prompt_tokens = load.num_prompt_tokens - former.num_prompt_tokens
            generation_tokens = load.num_generation_tokens - former.num_generation_tokens
            if prompt_tokens >= 0 and generation_tokens >= 0:  # else another client has reported newer numbers
                self._prompt_tokens += prompt_tokens
                self._generation_tokens += generation_tokens
                self._engines[load.engine] = load
        if report.num_first_tokens:
            self._first_tokens.append((now, report.num_first_tokens, report.num_late))
        while self._first_tokens and self._first_tokens[0][0] < now - UP_SECONDS:
            self._first_tokens.popleft()

    def hold(self, now: float) -> None:
        """Judge the load from now on only, because an operation runs."""
        self._judge_from(max(self._judged_from, now))

    def on_change(self, *, added: bool, now: float) -> None:
        """Begin anew, because the number of engines has changed."""
        self._num_failures = 0
        self._judge_from(now + SETTLE_SECONDS if added else now)

    def on_failure(self, now: float) -> float:
        """Make no decision for a while, because the number of engines could not be changed. Returns its seconds."""
        delay = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(self._num_failures, 16))
        self._blocked_until = now + delay
        self._num_failures += 1
        self._judge_from(now)
        return delay

    def _judge_from(self, time: float) -> None:
        self._samples.clear()
        self._recent.clear()
        self._first_tokens.clear()
        self._judged_from = time

    # Output.

    def decide(self, engines: Collection[EngineId], num_engines: int, now: float) -> Decision | None:
        """Return the number of engines that the load needs, if it is to change now.

        `engines`: the engines that have joined. `num_engines`: their number, with the engines that are restarting.
        """
        if now < self._blocked_until:
            return None
        if (bounded := min(max(num_engines, self.settings.min_engines), self.settings.max_engines)) != num_engines:
            limits = f"{self.settings.min_engines}:{self.settings.max_engines}"
            return self._decided(bounded, f"the number of engines, {num_engines}, is outside of {limits}")
        if not self._take_sample(engines, num_engines, now):
            return None
        self.reason = "the load fits the engines"
        return self._increase(num_engines, now) or self._decrease(num_engines, now)

    def _increase(self, num_engines: int, now: float) -> Decision | None:
        window = self._window(UP_SECONDS, now)
        if window is None:
            return None
        need = min((sample.least for sample in window), key=lambda need: need.num_engines)
        if need.num_engines <= num_engines:
            return None
        self._remember_capacity(now)
        if num_engines == self.settings.max_engines:
            self.reason = f"{need.reason}, but there are as many engines as may be"
            return None
        return self._decided(min(need.num_engines, self.settings.max_engines), need.reason)

    def _remember_capacity(self, now: float) -> None:
        """Remember the rate of the engine that computes most, of those with a queue: others may have just joined."""
        (begin, before), (end, loads) = self._recent[0], self._recent[-1]
        queued = [engine for engine, load in loads.items() if load.num_waiting > self.settings.target_queue]
        rates = [_Rates.of(before[name], loads[name], end - begin) for name in queued or loads if name in before]
        if end > begin and rates:
            self._capacity = now + CAPACITY_SECONDS, max(rates, key=sum)

    def _decrease(self, num_engines: int, now: float) -> Decision | None:
        window = self._window(self.settings.down_delay, now)
        if window is None:
            return None
        need = max((sample.comfortable for sample in window), key=lambda need: need.num_engines)
        target = max(need.num_engines, self.settings.min_engines)
        if target >= num_engines:
            return None
        return self._decided(target, f"{target} were enough for {self.settings.down_delay:g} s: {need.reason}")

    def _decided(self, num_engines: int, reason: str) -> Decision:
        self.reason = reason
        return Decision(num_engines, reason)

    # Samples.

    def _take_sample(self, engines: Collection[EngineId], num_engines: int, now: float) -> bool:
        """Add a sample of the load now, and return whether there is a new one."""
        self._reports = {
            client: (time, report)
            for client, (time, report) in self._reports.items()
            if now - time < REPORT_LIMIT_SECONDS
        }
        self._engines = {engine: load for engine, load in self._engines.items() if engine in engines}
        if not self._reports:
            self.reason = "no client reports the load"
            self._judge_from(max(self._judged_from, now))  # the time without reports proves nothing
            return False
        if now < self._judged_from or (self._samples and now - self._samples[-1].time < SAMPLE_SECONDS):
            return False
        least = self._least_need(num_engines)
        comfortable = self._comfortable_need(num_engines, least, now)
        self._samples.append(_Sample(now, least, comfortable, self._prompt_tokens, self._generation_tokens))
        self._recent.append((now, dict(self._engines)))
        while self._recent[0][0] < now - UP_SECONDS:
            self._recent.popleft()
        oldest = now - max(self.settings.down_delay, UP_SECONDS, RATE_SECONDS) - REPORT_LIMIT_SECONDS
        while self._samples[0].time < oldest:
            self._samples.popleft()
        return True

    def _window(self, seconds: float, now: float) -> list[_Sample] | None:
        """Return the samples of the last `seconds`; None if they do not go back as far."""
        if not self._samples or self._samples[0].time > now - seconds:
            return None
        start = len(self._samples)
        while start and self._samples[start - 1].time >= now - seconds:
            start -= 1
        return [self._samples[index] for index in range(start, len(self._samples))]

    def _num_waiting(self) -> int:
        """Number of sequences that wait in engines, or in clients for an engine."""
        queued = sum(report.num_unassigned for _, report in self._reports.values())
        return queued + sum(load.num_waiting for load in self._engines.values())

    def _num_running(self) -> int:
        return sum(load.num_running for load in self._engines.values())

    def _least_need(self, num_engines: int) -> _Need:
        """Return the number of engines without which the load is not carried."""
        settings, loads = self.settings, self._engines.values()
        needs = [_Need(1, "there is no load")]
        waiting, ongoing = self._num_waiting(), self._num_waiting() + self._num_running()
        room = settings.max_num_seqs
        if any(load.num_waiting > settings.target_queue for load in loads):
            # an engine with a queue computes as many sequences as its cache and its steps hold
            room = min(room, max(1, *(load.num_running for load in loads)))
        if ongoing - num_engines * room > num_engines * settings.target_queue:
            most = max(GROWTH_FACTOR * num_engines, num_engines + GROWTH_ENGINES)
            needs.append(_Need(min(most, math.ceil(ongoing / room)), f"{waiting} sequences wait"))
        cache = sum(load.cache_usage for load in loads)
        if cache > FULL_CACHE * num_engines:
            reason = f"{cache / num_engines:.0%} of the caches are in use"
            needs.append(_Need(math.ceil(cache / NEEDED_CACHE), reason))
        late = self._late_fraction()
        if late > LATE_FRACTION and ongoing > num_engines:  # one sequence alone is not computed faster by more engines
            more = max(1, int(LATE_GROWTH * num_engines))
            needs.append(_Need(num_engines + more, f"{late:.0%} of the first tokens come late"))
        return max(needs, key=lambda need: need.num_engines)

    def _comfortable_need(self, num_engines: int, least: _Need, now: float) -> _Need:
        """Return the number of engines that carry the load with room to spare."""
        settings, loads = self.settings, self._engines.values()
        waiting, running = self._num_waiting(), self._num_running()
        seqs = math.ceil((waiting + running) / (COMFORTABLE_SEQS * settings.max_num_seqs))
        cache = sum(load.cache_usage for load in loads)
        needs = [
            least,
            _Need(seqs, f"{running} sequences run"),
            _Need(math.ceil(cache / COMFORTABLE_CACHE), f"{cache / num_engines:.0%} of the caches are in use"),
        ]
        if waiting > COMFORTABLE_QUEUE * settings.target_queue * num_engines:
            needs.append(_Need(num_engines, f"{waiting} sequences wait"))
        if (late := self._late_fraction()) > COMFORTABLE_LATE_FRACTION:
            needs.append(_Need(num_engines, f"{late:.0%} of the first tokens come late"))
        window = self._window(RATE_SECONDS, now)
        if self._capacity is not None and self._capacity[0] < now:
            self._capacity = None
        if self._capacity is not None and window is not None:
            until, capacity = self._capacity
            rates = _rates(window, num_engines)
            if least.num_engines <= num_engines and rates.fraction_of(capacity) > 1.0:
                self._capacity = until, (capacity := rates)  # more is computed without a queue
            work = rates.fraction_of(capacity)
            reason = f"the engines compute {work:.0%} of the tokens at which a queue appeared"
            needs.append(_Need(math.ceil(num_engines * work / COMFORTABLE_WORK), reason))
        return max(needs, key=lambda need: need.num_engines)

    def _late_fraction(self) -> float:
        """Return the fraction of recent first tokens that were late, and count the overdue ones as late, too."""
        overdue = sum(report.num_overdue for _, report in self._reports.values())
        total = overdue + sum(count for _, count, _ in self._first_tokens)
        late = overdue + sum(late for _, _, late in self._first_tokens)
        return late / total if total else 0.0


def _rates(window: list[_Sample], num_engines: int) -> _Rates:
    """Return the tokens per second and engine between the first and the last sample."""
    first, last = window[0], window[-1]
    seconds = max(SAMPLE_SECONDS, last.time - first.time) * num_engines
    return _Rates(
        (last.prompt_tokens - first.prompt_tokens) / seconds,
        (last.generation_tokens - first.generation_tokens) / seconds,
    )
