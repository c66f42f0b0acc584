from __future__ import annotations

from eagleray.transport.heartbeat import LivenessClock


def test_who_was_heard_and_then_is_not_is_named_once():
    clocks = LivenessClock(limit=3.0, tick=1.0, now=0.0)
    clocks.hear("a", 0.5)
    for now in (1.0, 2.0, 3.0):
        clocks.hear("b", now)
        assert clocks.silent(now) == []
    assert clocks.silent(4.0) == [("a", 3.5)]
    clocks.hear("b", 4.5)
    clocks.hear("a", 4.5)  # too late: it was given up
    assert clocks.silent(5.0) == []
    assert clocks.silent(6.0) == []
    assert clocks.silent(7.0) == []
    assert clocks.silent(8.0) == [("b", 3.5)]


def test_who_was_never_heard_is_not_silent():
    clocks = LivenessClock(limit=1.0, tick=1.0, now=0.0)
    assert [clocks.silent(float(now)) for now in range(1, 10)] == [[]] * 9


def test_who_is_expected_has_its_time_and_then_the_limit():
    clocks = LivenessClock(limit=3.0, tick=1.0, now=0.0)
    for who in ("comes", "stays away", "is forgotten"):
        clocks.expect(who, 0.0, within=6.0)
    for now in (1.0, 2.0, 3.0, 4.0):
        assert clocks.silent(now) == []
    clocks.hear("comes", 4.5)
    clocks.forget("is forgotten")
    assert clocks.silent(5.0) == clocks.silent(6.0) == []
    assert clocks.silent(6.5) == [("stays away", 6.5)]
    assert clocks.silent(7.0) == []
    assert clocks.silent(8.0) == [("comes", 3.5)]


def test_time_in_which_the_listener_did_not_run_does_not_count():
    clocks = LivenessClock(limit=3.0, tick=1.0, now=0.0)
    clocks.hear("a", 0.5)
    assert clocks.silent(1.0) == []
    assert clocks.silent(100.0) == []
    assert clocks.silent(101.0) == []
    assert clocks.silent(102.0) == []
    assert clocks.silent(103.0) == []
    assert clocks.silent(103.5) == [("a", 3.5)]


def test_who_is_forgotten_is_not_silent():
    clocks = LivenessClock(limit=3.0, tick=1.0, now=0.0)
    clocks.hear("a", 0.0)
    clocks.hear("b", 0.0)
    clocks.forget("a")
    clocks.forget("stranger")
    for now in (1.0, 2.0, 3.0):
        assert clocks.silent(now) == []
    assert clocks.silent(4.0) == [("b", 4.0)]
