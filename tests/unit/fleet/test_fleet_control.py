"""Control calls through the fleet's state machine: a client's message, the engines' replies, the answer."""

from __future__ import annotations

from fleet_machine import INFO, OBSERVER, Machine, later

from eagleray.config.resolve import DEMO_MODEL_DIR
from eagleray.fleet.events import StartEngines
from eagleray.identity import ClientId, EngineId
from eagleray.messages.control import (
    AbortRequests,
    FetchWeights,
    InstanceState,
    Pause,
    Resume,
    SetState,
    StateChanged,
)
from eagleray.messages.lifecycle import EngineStarted

PAUSED = InstanceState(pause="keep")
E = [EngineId("i", rank) for rank in range(2)]
SERVER = ClientId("i", 0)


def starting() -> Machine:
    """Return a machine with an observer, and an engine that was spawned."""
    machine = Machine()
    machine.handle(StartEngines((0,)))
    machine.adopt()
    return machine


def test_control_pause_sets_the_state_of_all_engines_and_answers():
    it = Machine.serving(data_parallel_size=2)
    call = it.call(Pause(mode="keep"))
    for engine in E:
        assert it.execute(engine, num_kept=3).body == SetState(state=PAUSED)
    assert StateChanged(PAUSED) in it.received[OBSERVER]
    assert it.answer(call) == {"status": "paused", "num_kept": 6, "num_aborted": 0}


def test_control_engine_killed_in_a_pause_successor_is_attached_paused_and_joins():
    it = Machine.serving()
    call = it.call(Pause(mode="keep"))
    it.exit(E[0])  # before it has replied
    assert it.answer(call)["status"] == "paused"
    it.pass_time(0.0)
    it.bring_up(later(E[0]))
    assert it.attached[later(E[0])].state == PAUSED
    assert it.events()[-1] == "+engine-0.1"


def test_control_state_changed_during_start_engine_joins_when_it_has_adopted_it():
    it = starting()
    it.bind(E[0])
    assert it.attached[E[0]].state == InstanceState()
    assert it.answer(it.call(Pause(mode="keep")))["status"] == "paused"
    it.start(E[0])
    it.call(Resume())
    assert it.execute(E[0]).body == SetState(state=PAUSED)
    assert not it.is_serving
    assert it.events() == []
    it.execute(E[0])
    it.confirm()
    assert it.is_serving
    assert it.events() == ["+engine-0"]


def test_control_engine_without_the_weights_that_are_required_joins_when_it_has_them():
    it = starting()
    it.bind(E[0])
    it.handle(EngineStarted(E[0], INFO, update=5))
    assert it.events() == []
    assert it.execute(E[0], update=0).body == FetchWeights(update=0, weight_dir=str(DEMO_MODEL_DIR))
    assert it.events() == ["+engine-0"]


def test_control_successor_without_weights_serves_again_only_when_it_has_them(caplog):
    caplog.set_level("INFO", logger="eagleray")
    it = Machine.serving()
    it.exit(E[0])
    it.pass_time(0.0)
    it.bind(later(E[0]))
    it.handle(EngineStarted(later(E[0]), INFO, update=5))
    assert "engine-0.1 has started; it serves when it has the weights of update 0" in caplog.text
    it.now = 3.0
    assert "serves again" not in caplog.text
    it.execute(later(E[0]), update=0)
    assert it.events()[-1] == "+engine-0.1"
    assert "engine-0.1 serves again after 3.0 s" in caplog.text


def test_control_engine_does_not_reply_deadline_names_it():
    it = Machine.serving()
    call = it.call(Pause(mode="keep"), timeout=5.0)
    it.pass_time(5.0)
    failure = it.answer(call)
    assert failure.kind == "DeadlineExceeded"
    assert failure.message == "pause: time limit reached: engine-0 has not replied"


def test_control_abort_requests_is_executed_by_clients():
    it = Machine.serving()
    call = it.call(AbortRequests(request_ids=["a"]))
    for client in (OBSERVER, SERVER):
        assert it.execute(client, aborted=2).body == AbortRequests(request_ids=["a"])
    assert it.answer(call) == {"status": "aborted", "aborted": 4}
