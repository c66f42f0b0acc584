"""The number of engines follows reports of load, in the fleet's state machine."""

from __future__ import annotations

import logging

import pytest
from fleet_machine import OBSERVER, Machine

from eagleray.fleet import timeouts
from eagleray.fleet.autoscaling import FIRST_BACKOFF_SECONDS, SETTLE_SECONDS
from eagleray.identity import EngineId
from eagleray.messages.control import Pause
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Stop
from eagleray.messages.scaling import (
    Drained,
    Draining,
    EngineLoadReport,
    GetScaling,
    LoadReport,
    RestartEngines,
    Scale,
)

E = [EngineId("i", rank) for rank in range(6)]
DOWN_DELAY = 20.0


def autoscaling(**options: object) -> Machine:
    given = {"autoscale": "1:3", "autoscale_down_delay": DOWN_DELAY, "max_num_seqs": 8, "api_server_count": 1}
    machine = Machine.serving(**(given | options))
    machine.forget()
    return machine


def report(it: Machine, seconds: float, running: int, waiting: int) -> None:
    """Let time pass, in which the observer reports this load of every engine each second."""
    for _ in range(int(seconds)):
        it.pass_time(1.0)
        engines = sorted(it.state.engines, key=lambda engine: engine.rank)
        load = {"num_running": running, "num_waiting": waiting, "cache_usage": running / 16}
        tokens = {"num_prompt_tokens": 0, "num_generation_tokens": 0}
        loads = [EngineLoadReport(engine=engine, **load, **tokens) for engine in engines]
        it.handle(LoadReport(client=OBSERVER, engines=loads))


def ranks(it: Machine) -> list[int]:
    return sorted(engine.rank for engine in it.state.engines)


def status(it: Machine) -> dict:
    return it.answer(it.call(GetScaling()))["autoscale"]


def test_reports_of_a_queue_and_of_silence_lead_to_spawns_and_removals():
    it = autoscaling()
    report(it, 4, running=8, waiting=40)
    assert ranks(it) == [0]
    report(it, 3, running=8, waiting=40)
    assert {E[1], E[2]} < set(it.spawned), "three hold the sequences"
    report(it, 30, running=8, waiting=100)
    assert status(it)["reason"] == "an operation runs"
    for engine in E[1:3]:
        it.bring_up(engine)
    report(it, SETTLE_SECONDS + 20, running=8, waiting=100)
    assert ranks(it) == [0, 1, 2], "the maximum"
    assert status(it)["reason"] == "300 sequences wait, but there are as many engines as may be"
    it.forget()
    report(it, DOWN_DELAY + 3, running=1, waiting=0)
    assert [message.engine for message in it.received[OBSERVER]] == E[1:3]
    assert all(isinstance(message, Draining) for message in it.received[OBSERVER])
    for client in it.state._membership.clients:
        for engine in E[1:3]:
            it.handle(Drained(client, engine))
    assert it.received[E[2]][-1] == Stop(0.0)
    it.exit_all()
    assert ranks(it) == [0]
    report(it, 100, running=1, waiting=0)
    assert ranks(it) == [0]
    described = status(it)
    assert (described["min"], described["max"], described["reason"]) == (1, 3, "the load fits the engines")
    assert described["last_decision"]["data_parallel_size"] == 1
    assert described["last_error"] is None


def test_removed_engine_with_requests_leaves_after_the_time_to_finish_them():
    it = autoscaling(data_parallel_size=2)
    report(it, DOWN_DELAY + 3, running=1, waiting=0)
    it.pass_time(timeouts.AUTOSCALE_DRAIN_SECONDS + 1)
    assert it.received[E[1]] == [Stop(0.0)]


def test_lack_of_room_is_tried_again_and_logged_once(caplog: pytest.LogCaptureFixture):
    it = autoscaling()
    it.shortage = "there is no GPU left"
    with caplog.at_level(logging.INFO):
        report(it, 5 * FIRST_BACKOFF_SECONDS, running=8, waiting=40)
    lines = [record.message for record in caplog.records]
    assert lines == [
        "autoscaling from 1 to 3 engines (operation autoscale-1): 40 sequences wait",
        "the number of engines cannot follow the load: there is no GPU left; the next attempt is in 30 s",
    ]
    assert status(it)["last_error"] == "there is no GPU left"
    it.shortage = None
    report(it, 5 * FIRST_BACKOFF_SECONDS, running=8, waiting=40)
    assert {E[1], E[2]} < set(it.spawned)


def test_manual_number_is_refused_and_other_operations_run():
    it = autoscaling(data_parallel_size=2)
    for request in (Scale(num_engines=3), Scale(remove_ranks=(0,), num_api_servers=2)):
        failure = it.answer(it.call(request))
        assert isinstance(failure, Failure)
        assert "the number of engines follows the load (`autoscale` 1:3)" in failure.message
    assert it.answer(it.call(Scale(num_api_servers=2))) is None
    assert it.answer(it.call(RestartEngines())) is None
    report(it, 60, running=8, waiting=40)
    assert E[2] not in it.spawned, "nothing is decided while an operation runs"


def test_paused_instance_is_not_scaled_and_lost_engines_come_back():
    it = autoscaling()
    it.call(Pause())
    report(it, 60, running=8, waiting=40)
    assert status(it)["reason"] == "the instance is paused"
    assert ranks(it) == [0]
    it = autoscaling(autoscale="2:3", max_engine_restarts=0)
    assert ranks(it) == [0, 1]
    it.exit(E[1])
    assert ranks(it) == [0]
    report(it, 2, running=0, waiting=0)
    assert it.spawned[-1] == EngineId("i", 1, 1)
    it.handle(LoadReport(client=OBSERVER, engines=[]))


def test_reports_to_a_fleet_of_a_fixed_size_change_nothing():
    it = Machine.serving(max_num_seqs=8)
    report(it, 60, running=8, waiting=400)
    assert ranks(it) == [0]
    assert "autoscale" not in it.answer(it.call(GetScaling()))
