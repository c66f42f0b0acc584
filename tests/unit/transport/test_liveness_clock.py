from __future__ import annotations

from eagleray.transport.heartbeat import LivenessClock


def test_liveness_clock_heartbeats_stop_peer_is_named_once():
    clocks = LivenessClock(limit=3.0, tick=1.0, now=0.0)
    clocks.record("a", 0.5)
    for now in (1.0, 2.0, 3.0):
        clocks.record("b", now)
        assert clocks.silent(now) == []
    assert clocks.silent(4.0) == [("a", 3.5)]
    clocks.record("b", 4.5)
    clocks.record("a", 4.5)  # too late: it was given up
    assert clocks.silent(5.0) == []
    assert clocks.silent(6.0) == []
    assert clocks.silent(7.0) == []
    assert clocks.silent(8.0) == [("b", 3.5)]


def test_liveness_clock_no_first_heartbeat_is_not_silent():
    clocks = LivenessClock(limit=1.0, tick=1.0, now=0.0)
    assert [clocks.silent(float(now)) for now in range(1, 10)] == [[]] * 9


def test_liveness_clock_expected_peer_first_limit_then_normal_limit():
    clocks = LivenessClock(limit=3.0, tick=1.0, now=0.0)
    for who in ("comes", "stays away", "is forgotten"):
        clocks.expect(who, 0.0, within=6.0)
    for now in (1.0, 2.0, 3.0, 4.0):
        assert clocks.silent(now) == []
    clocks.record("comes", 4.5)
    clocks.forget("is forgotten")
    assert clocks.silent(5.0) == clocks.silent(6.0) == []
    assert clocks.silent(6.5) == [("stays away", 6.5)]
    assert clocks.silent(7.0) == []
    assert clocks.silent(8.0) == [("comes", 3.5)]


def test_liveness_clock_stopped_receiver_resets_clocks():
    clocks = LivenessClock(limit=3.0, tick=1.0, now=0.0)
    clocks.record("a", 0.5)
    assert clocks.silent(1.0) == []
    assert clocks.silent(100.0) == []
    assert clocks.silent(101.0) == []
    assert clocks.silent(102.0) == []
    assert clocks.silent(103.0) == []
    assert clocks.silent(103.5) == [("a", 3.5)]


def test_liveness_clock_forgotten_peer_is_not_silent():
    clocks = LivenessClock(limit=3.0, tick=1.0, now=0.0)
    clocks.record("a", 0.0)
    clocks.record("b", 0.0)
    clocks.forget("a")
    clocks.forget("stranger")
    for now in (1.0, 2.0, 3.0):
        assert clocks.silent(now) == []
    assert clocks.silent(4.0) == [("b", 4.0)]
