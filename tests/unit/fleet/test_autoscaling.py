from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import pytest

from eagleray.fleet.autoscaling import (
    FIRST_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    SETTLE_SECONDS,
    UP_SECONDS,
    AutoscalePolicy,
    AutoscaleSettings,
    Decision,
)
from eagleray.identity import ClientId, EngineId
from eagleray.messages.scaling import EngineLoadReport, LoadReport

CLIENT = ClientId("i", 0)
E = [EngineId("i", rank) for rank in range(20)]
DOWN_DELAY = 60.0


class Fleet:
    """A policy, and the engines that it decides about, with a load that the test sets."""

    def __init__(self, num_engines: int = 1, **settings: float) -> None:
        defaults = {"min_engines": 1, "max_engines": 8, "max_num_seqs": 32}
        defaults |= {"target_queue": 5.0, "down_delay": DOWN_DELAY}
        self.policy = AutoscalePolicy(AutoscaleSettings(**(defaults | settings)))
        self.num_engines = num_engines
        self.now = 1000.0
        self.tokens = 0

    def report(self, *loads: tuple[int, int], cache: float = 0.0, tokens: int = 0, **fields: int) -> Decision | None:
        """Let a second pass, with these numbers of running and waiting sequences in each engine."""
        self.now += 1.0
        self.tokens += tokens
        engines = [
            EngineLoadReport(
                engine=E[rank],
                num_running=running,
                num_waiting=waiting,
                cache_usage=cache,
                num_prompt_tokens=self.tokens,
                num_generation_tokens=self.tokens,
            )
            for rank, (running, waiting) in enumerate(loads)
        ]
        self.policy.record(LoadReport(client=CLIENT, engines=engines, **fields), self.now)
        return self.policy.decide(E[: self.num_engines], self.num_engines, self.now)

    def decide_within(self, seconds: float, *loads: tuple[int, int], **fields: float) -> tuple[float, int] | None:
        """Report the same load for some seconds. Returns the time and the number of engines of the first decision."""
        begin = self.now
        while self.now < begin + seconds:
            if decision := self.report(*loads, **fields):
                return self.now - begin, decision.num_engines
        return None

    def change(self, num_engines: int) -> None:
        self.policy.on_change(added=num_engines > self.num_engines, now=self.now)
        self.num_engines = num_engines


def test_decide_queue_adds_as_many_engines_as_the_sequences_need():
    it = Fleet()
    assert it.decide_within(20, (32, 80)) == (UP_SECONDS + 1, 4)
    assert it.policy.reason == "80 sequences wait"
    it.change(4)
    assert it.decide_within(20, (32, 60), (10, 0), (10, 0), (10, 0)) is None, "the others have room for what arrives"
    assert Fleet().decide_within(20, (32, 2000)) == (UP_SECONDS + 1, 5), "one addition is bounded"
    assert Fleet(max_engines=2).decide_within(20, (32, 2000)) == (UP_SECONDS + 1, 2)
    assert Fleet().decide_within(20, (8, 24), cache=1.0) == (UP_SECONDS + 1, 4), "a cache that is full for 8 of them"


@pytest.mark.parametrize("load", [(32, 4), (30, 0), (0, 0)], ids=["a queue below the target", "no queue", "nothing"])
def test_decide_load_that_fits_changes_nothing(load: tuple[int, int]):
    assert Fleet().decide_within(200, load) is None


def test_decide_short_burst_is_left_to_the_engines():
    it = Fleet()
    for _ in range(20):
        assert it.decide_within(4, (32, 100)) is None
        assert it.decide_within(1, (32, 0)) is None


def test_decide_full_cache_and_requests_without_an_engine_add_engines():
    assert Fleet(2).decide_within(20, (4, 0), (4, 0), cache=0.95) == (UP_SECONDS + 1, 3)
    assert Fleet().decide_within(20, num_unassigned=100) == (UP_SECONDS + 1, 4)


def test_decide_late_first_tokens_add_a_quarter():
    assert Fleet(4).decide_within(20, *[(9, 0)] * 4, num_first_tokens=10, num_late=2) == (UP_SECONDS + 1, 5)
    assert Fleet(4).decide_within(20, *[(9, 0)] * 4, num_first_tokens=10, num_late=1) is None
    assert Fleet(4).decide_within(20, *[(9, 0)] * 4, num_overdue=1) == (UP_SECONDS + 1, 5)
    assert Fleet(4).decide_within(20, (1, 0), num_overdue=1) is None, "more engines do not compute one prompt faster"


def test_decide_silence_removes_engines_after_the_delay_and_keeps_the_minimum():
    it = Fleet(6, min_engines=2)
    it.decide_within(1, *[(30, 0)] * 6)
    assert it.decide_within(200, *[(0, 0)] * 6) == (DOWN_DELAY + 1, 2)
    it.change(2)
    assert it.decide_within(200, (0, 0), (0, 0)) is None


def test_decide_removal_follows_the_largest_load_of_the_delay():
    it = Fleet(6)
    for second in range(60):
        assert it.report(*[(8 if second == 30 else 1, 0)] * 6) is None
    assert it.report(*[(1, 0)] * 6).num_engines == math.ceil(48 / (0.6 * 32))


def test_decide_remembers_at_which_rate_a_queue_appeared():
    it = Fleet()
    assert it.decide_within(20, (32, 30), tokens=1000) == (UP_SECONDS + 1, 2)
    it.change(2)
    assert it.decide_within(3 * DOWN_DELAY, (8, 0), (8, 0), tokens=450) is None, "one would compute 900 of 1000"
    assert it.decide_within(3 * DOWN_DELAY, (8, 0), (8, 0), tokens=300)[1] == 1


def test_decide_after_an_addition_the_load_settles_first():
    it = Fleet()
    it.change(2)
    assert it.decide_within(60, (32, 100), (32, 100)) == (SETTLE_SECONDS + UP_SECONDS, 6)


def test_decide_failures_back_off_until_one_works():
    it = Fleet()
    waits = []
    for _ in range(8):
        waits.append(it.decide_within(1000, (32, 100))[0])
        it.policy.on_failure(it.now)
    assert waits[1] == pytest.approx(FIRST_BACKOFF_SECONDS, abs=UP_SECONDS + 2)
    assert waits[2] == pytest.approx(2 * FIRST_BACKOFF_SECONDS, abs=UP_SECONDS + 2)
    assert waits[-1] == pytest.approx(MAX_BACKOFF_SECONDS, abs=UP_SECONDS + 2)
    it.decide_within(1000, (32, 100))
    it.change(2)
    it.policy.on_failure(it.now)
    assert it.decide_within(1000, (32, 100), (32, 100))[0] <= FIRST_BACKOFF_SECONDS + UP_SECONDS + 2


def test_decide_lost_engine_comes_back_at_once_and_missing_reports_prove_nothing():
    it = Fleet(1, min_engines=2)
    assert it.report((0, 0)) == Decision(2, "the number of engines, 1, is outside of 2:8")
    it = Fleet(4)
    it.decide_within(DOWN_DELAY - 10, *[(0, 0)] * 4)
    it.now += 30
    assert it.policy.decide(E[:4], 4, it.now) is None
    assert it.policy.reason == "no client reports the load"
    assert it.decide_within(DOWN_DELAY - 1, *[(0, 0)] * 4) is None


def test_record_older_numbers_of_another_client_do_not_count_twice():
    it = Fleet(2)
    for tokens in (100, -50) * 10:
        it.report((1, 0), (1, 0), tokens=tokens)
    assert it.policy._prompt_tokens == 2 * (it.tokens + 50 - 100)


# A day's load.

STEP = 0.5
MAX_SEQS, NUM_TOKENS, JOIN_SECONDS, TTFT = 32, 100, 5.0, 5.0
STEP_SECONDS, SECONDS_PER_SEQ = 0.02, 0.001
REQUESTS_PER_SECOND = MAX_SEQS / (STEP_SECONDS + SECONDS_PER_SEQ * MAX_SEQS) / NUM_TOKENS
"""Most requests that an engine finishes: 6.2."""


class SimulatedEngine:
    """Computes `NUM_TOKENS` tokens for each request; a step takes longer with more of them."""

    def __init__(self, max_seqs: int) -> None:
        self.max_seqs = max_seqs
        self.waiting: deque[float] = deque()
        self.running: deque[float] = deque()
        """Values of `progress` at which requests finish."""
        self.progress = 0.0
        self.num_prompts = self.num_tokens = 0

    def advance(self, now: float) -> list[float]:
        """Compute for a while. Returns the times that requests waited which are admitted now."""
        tokens = STEP / (STEP_SECONDS + SECONDS_PER_SEQ * len(self.running))
        self.progress += tokens
        self.num_tokens += int(tokens * len(self.running))
        while self.running and self.running[0] <= self.progress:
            self.running.popleft()
        waits = []
        while self.waiting and len(self.running) < self.max_seqs:
            waits.append(now - self.waiting.popleft())
            self.running.append(self.progress + NUM_TOKENS)
        self.num_prompts += len(waits)
        return waits


class Day:
    """Serve requests that arrive at `rate(time)` a second with engines that the policy asks for."""

    def __init__(self, rate: Callable[[float], float], seconds: float, *, seed: int = 0, **settings: float) -> None:
        fleet = Fleet(**settings)
        self.policy, self.limits = fleet.policy, fleet.policy.settings
        max_seqs = self.limits.max_num_seqs
        self.engines = {E[0]: SimulatedEngine(max_seqs)}
        self.waits: list[float] = []
        self.sizes: list[tuple[float, int]] = []
        """Numbers of engines that were asked for, with their times."""
        self.engine_seconds = 0.0
        rng, joins, newest, late, started, number = random.Random(seed), math.inf, 0.0, 0, 0, 1
        for tick in range(int(seconds / STEP)):
            now = tick * STEP
            arrivals = max(0, round(rng.gauss(rate(now) * STEP, math.sqrt(rate(now) * STEP))))
            for _ in range(arrivals):
                engine = min(self.engines.values(), key=lambda engine: len(engine.waiting) + len(engine.running))
                engine.waiting.append(now)
            for engine in self.engines.values():
                waits = engine.advance(now)
                self.waits += waits
                recent = [wait for wait in waits if now - wait >= newest]
                started, late = started + len(recent), late + sum(wait > TTFT for wait in recent)
            self.engine_seconds += max(number, len(self.engines)) * STEP
            if now >= joins:
                joins, newest = math.inf, now
                self.engines |= {E[rank]: SimulatedEngine(max_seqs) for rank in range(len(self.engines), number)}
                self.policy.on_change(added=True, now=now)
            if tick % 2:
                continue
            self.policy.record(self._report(started, late), now)
            started = late = 0
            if joins < math.inf or not (decision := self.policy.decide(self.engines, number, now)):
                continue
            assert self.limits.min_engines <= decision.num_engines <= self.limits.max_engines
            assert decision.num_engines != number
            number = decision.num_engines
            self.sizes.append((now, number))
            if number > len(self.engines):
                joins = now + JOIN_SECONDS
            else:
                self._remove(number, now)

    def _remove(self, number: int, now: float) -> None:
        """Let engines go; their requests move to the others, which compute their rest."""
        gone = [self.engines.pop(E[rank]) for rank in range(number, len(self.engines))]
        for engine in gone:
            for index, end in enumerate(engine.running):
                other = self.engines[E[index % number]]
                other.running.append(other.progress + end - engine.progress)
            self.engines[E[0]].waiting.extend(engine.waiting)
        self.policy.on_change(added=False, now=now)

    def _report(self, started: int, late: int) -> LoadReport:
        loads = [
            EngineLoadReport(
                engine=name,
                num_running=len(engine.running),
                num_waiting=len(engine.waiting),
                cache_usage=0.7 * len(engine.running) / engine.max_seqs,
                num_prompt_tokens=50 * engine.num_prompts,
                num_generation_tokens=engine.num_tokens,
            )
            for name, engine in self.engines.items()
        ]
        return LoadReport(client=CLIENT, engines=loads, num_first_tokens=started, num_late=late)

    @property
    def kept(self) -> float:
        """Fraction of the requests whose first token came in time."""
        return sum(wait <= TTFT for wait in self.waits) / len(self.waits)


DAY = 2 * 3600.0
"""A day in fast motion: what takes an hour takes 300 seconds."""
BURSTS = [(1700.0, 150.0), (3500.0, 150.0), (5200.0, 150.0)]
SILENCE = (6000.0, 6600.0)


def rate_of_day(time: float) -> float:
    if SILENCE[0] <= time < SILENCE[1]:
        return 0.0
    base = 10.5 - 9.5 * math.cos(2 * math.pi * time / DAY)
    return base * (2.0 if any(begin <= time < begin + seconds for begin, seconds in BURSTS) else 1.0)


def test_day_of_load_first_tokens_are_in_time_at_a_bounded_cost_without_flapping():
    day = Day(rate_of_day, DAY)
    ideal = [max(1, math.ceil(rate_of_day(tick) / (0.85 * REQUESTS_PER_SECOND))) for tick in range(int(DAY))]
    cost, hours = day.engine_seconds / sum(min(8, number) for number in ideal), DAY / 3600
    assert day.kept > 0.97
    assert cost < 1.2
    assert len(day.sizes) / hours < 12, day.sizes
    for begin, _ in BURSTS:
        assert any(begin < time < begin + 30 for time, _ in day.sizes), "a burst is answered soon"
    for (time, size), (later, next_size) in pairwise(day.sizes):
        assert next_size > size or later - time >= DOWN_DELAY, "engines are removed slowly"
    assert min(number for time, number in day.sizes if SILENCE[0] < time < SILENCE[1]) == 1


@pytest.mark.parametrize(("max_seqs", "load"), [(32, 1.5), (32, 2.25), (32, 3.15), (256, 1.2)])
def test_constant_load_number_of_engines_settles(max_seqs: int, load: float):
    """`load`: of how many engines. With room for 256 sequences, the sequences alone would seem to fit one engine."""
    rate = load * max_seqs / (STEP_SECONDS + SECONDS_PER_SEQ * max_seqs) / NUM_TOKENS
    day = Day(lambda time: rate, 1500.0, max_num_seqs=max_seqs)
    assert not [time for time, _ in day.sizes if time > 500], day.sizes
    assert load < day.sizes[-1][1] <= math.ceil(load / 0.8) + 1
