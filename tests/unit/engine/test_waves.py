from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleray.engine.waves import Waves


@dataclass
class Request:
    num_left: int
    """Steps that are not sent yet."""
    num_in_flight: int = 0


@dataclass
class Engine:
    """Mimics an engine core and its group member; a request is only a number of steps."""

    waves: Waves
    depth: int
    ahead: int
    """Steps of one request that may be in flight: less than `depth`, and some steps find nothing to do."""
    requests: list[Request] = field(default_factory=list)
    inbox: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: deque[list[Request]] = field(default_factory=deque)
    num_sent: int = 0
    num_idle_sent: int = 0
    num_done: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.in_flight)

    def plan(self) -> list[Request]:
        planned = [one for one in self.requests if one.num_left and one.num_in_flight < self.ahead]
        for one in planned:
            one.num_left -= 1
            one.num_in_flight += 1
        return planned

    def apply(self) -> None:
        for one in self.in_flight.popleft():
            one.num_in_flight -= 1
            if one.num_left == one.num_in_flight == 0:
                self.requests.remove(one)


class Group:
    """Engines that run in any order, with messages of any delay. Like a real one, an engine that waits for a step does
    nothing else."""

    def __init__(self, count: int, *, depth: int, ahead: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engines = [Engine(Waves(depth=depth), depth, min(ahead, depth)) for _ in range(count)]
        for engine in self.engines:
            engine.waves.form(1)
        self.works: list[bool] = []
        """Of each step: whether somebody did something in it. Known when all have sent it."""
        self.on_the_way: list[tuple[Engine, tuple[int, int]]] = []

    def turn(self) -> bool:
        """Let one possible event happen, if there is any."""
        actions = [lambda engine=engine: self.run(engine) for engine in self.engines if self.can_run(engine)]
        if self.on_the_way:
            actions.append(self.deliver)
        if not actions:
            return False
        self.rng.choice(actions)()
        return True

    def settle(self) -> None:
        for _ in range(100_000):
            if not self.turn():
                return
        raise AssertionError("it goes on for ever")

    def deliver(self) -> None:
        engine, call = self.on_the_way.pop(self.rng.randrange(len(self.on_the_way)))
        engine.inbox.append(call)

    def can_run(self, engine: Engine) -> bool:
        if engine.in_flight:
            return self.is_complete(engine.num_done)
        return bool(engine.inbox or engine.requests or engine.waves.is_on or engine.waves.is_requested)

    def is_complete(self, step: int) -> bool:
        return all(engine.num_sent > step for engine in self.engines)

    def run(self, engine: Engine) -> None:
        """Run one turn of the loop, after the wait for the oldest step, if one is in flight."""
        if engine.in_flight:
            engine.waves.on_result(any_engine_busy=self.works[engine.num_done])
            engine.num_done += 1
            engine.apply()
        while engine.inbox:
            engine.waves.on_wave_started(*engine.inbox.popleft())
        if engine.waves.maybe_start(has_work=engine.has_work):
            others = [other for other in self.engines if other is not engine]
            self.on_the_way += [(other, (engine.waves.epoch, engine.waves.wave)) for other in others]
        while len(engine.in_flight) < engine.depth and engine.waves.may_send:
            engine.waves.on_sent()
            planned = engine.plan()
            if engine.num_sent == len(self.works):
                self.works.append(False)
            self.works[engine.num_sent] |= bool(planned)
            engine.num_sent += 1
            engine.num_idle_sent += not planned
            engine.in_flight.append(planned)

    def check_at_rest(self) -> None:
        assert not any(engine.requests for engine in self.engines), "requests that nobody computes"
        assert len({engine.num_sent for engine in self.engines}) == 1, "somebody has stepped alone"
        assert len({engine.waves.wave for engine in self.engines}) == 1
        assert not any(engine.in_flight or engine.waves.is_on for engine in self.engines)


GROUPS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
ARRIVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 6)), max_size=12)


@settings(max_examples=300)
@given(GROUPS, ARRIVALS)
def test_waves_random_arrivals_all_engines_take_the_same_steps(shape, arrivals):
    count, depth, ahead, seed = shape
    group = Group(count, depth=depth, ahead=ahead, seed=seed)
    for pause, number, steps in arrivals:
        for _ in range(pause):
            group.turn()
        group.engines[number % count].requests.append(Request(steps))
    group.settle()
    group.check_at_rest()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_waves_idle_engine_steps_until_depth_after_last_work(depth):
    group = Group(3, depth=depth, ahead=depth, seed=0)
    group.engines[1].requests.append(Request(20))
    group.settle()
    group.check_at_rest()
    assert [engine.num_sent for engine in group.engines] == [20 + depth] * 3
    assert [engine.num_idle_sent for engine in group.engines] == [20 + depth, depth, 20 + depth]


def test_waves_without_work_none_starts():
    group = Group(3, depth=2, ahead=2, seed=0)
    assert not group.turn()
    group.engines[0].requests.append(Request(1))
    group.settle()
    assert not group.turn()


def test_waves_busy_step_extends_the_wave():
    waves = Waves(depth=2)
    waves.form(1)
    assert not waves.may_send
    assert waves.maybe_start(has_work=True)
    sent = 0
    for works in (True, False, False):
        while waves.may_send:
            waves.on_sent()
            sent += 1
        waves.on_result(any_engine_busy=works)
    assert (sent, waves.is_on, waves.wave) == (3, False, 1)


def test_waves_requested_wave_starts_without_notifying():
    waves = Waves(depth=1)
    waves.form(3)
    waves.on_wave_started(3, 1)
    assert waves.is_requested
    assert not waves.maybe_start(has_work=True)
    assert waves.is_on
    assert not waves.is_requested
    waves.on_wave_started(3, 1)  # as another one has called, too
    assert not waves.is_requested


def test_waves_request_during_wave_is_for_the_next():
    waves = Waves(depth=1)
    waves.form(1)
    waves.maybe_start(has_work=True)
    waves.on_wave_started(1, 2)
    waves.on_sent()
    assert not waves.maybe_start(has_work=True)
    waves.on_result(any_engine_busy=False)
    assert not waves.maybe_start(has_work=False)
    assert (waves.is_on, waves.wave) == (True, 2)


def test_waves_request_of_later_epoch_counts_after_form():
    waves = Waves(depth=1)
    waves.form(2)
    waves.on_wave_started(1, 5)
    assert not waves.is_requested
    waves.on_wave_started(3, 1)
    assert not waves.is_requested
    waves.form(3)
    assert waves.is_requested


def test_waves_stopped_wave_has_ended():
    waves = Waves(depth=2)
    waves.form(1)
    waves.maybe_start(has_work=True)
    waves.on_sent()
    waves.stop()
    assert not waves.is_on
    assert not waves.may_send
    waves.form(2)
    assert waves.maybe_start(has_work=True)
    assert waves.wave == 1
