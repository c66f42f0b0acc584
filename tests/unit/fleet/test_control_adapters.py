"""Loads and unloads of adapters in the state machine of an instance."""

from __future__ import annotations

import pytest
from control_fakes import SteeredFleet

from eagleray.messages.control import (
    DropAdapter,
    LoadAdapter,
    Pause,
    Sleep,
    StageAdapter,
    StartWeightUpdate,
    UnloadAdapter,
)
from eagleray.messages.failure import Failure

A = LoadAdapter(name="a", path="/a")
B = LoadAdapter(name="b", path="/b")


def names(state) -> list[tuple[str, int, str]]:
    return [(adapter.name, adapter.number, adapter.digest) for adapter in state.adapters]


def test_load_adapter_reaches_all_engines_and_clients_before_the_answer():
    fleet = SteeredFleet()
    assert fleet.run(A) == {"status": "ok", "lora_name": "a", "number": 1}
    assert names(fleet.published) == [("a", 1, "d")]
    assert [names(engine.state) for engine in fleet.engines.values()] == [[("a", 1, "d")]] * 2
    assert {client: names(state) for client, state in fleet.client_states.items()} == {
        client: [("a", 1, "d")] for client in fleet.clients
    }


def test_load_adapter_is_not_answered_before_a_client_has_adopted_it():
    fleet = SteeredFleet()
    call = fleet.call(A)
    for rank in (0, 1, 0, 1):
        fleet.execute_next(rank)
    assert fleet.client_executes_next(0)
    assert call not in fleet.answers
    assert fleet.client_executes_next(1)
    assert fleet.outcome(call)["status"] == "ok"


def test_load_adapter_that_one_engine_refuses_is_dropped_on_all_and_changes_nothing():
    fleet = SteeredFleet()
    call = fleet.call(A)
    fleet.execute_next(0)
    fleet.execute_next(1, Failure(message="it does not fit", kind="CheckpointError", is_user_error=True))
    fleet.settle()
    assert fleet.outcome(call).message == "it does not fit"
    assert fleet.published.adapters == ()
    assert [engine.adapters for engine in fleet.engines.values()] == [[], []]
    assert all(DropAdapter(1) in engine.received for engine in fleet.engines.values())


def test_load_adapter_that_is_no_longer_awaited_is_dropped():
    fleet = SteeredFleet()
    call = fleet.call(A, timeout=5)
    fleet.execute_next(0)
    fleet.advance(6)
    assert fleet.outcome(call).kind == "DeadlineExceeded"
    fleet.settle()
    assert [engine.adapters for engine in fleet.engines.values()] == [[], []]


def test_load_adapter_whose_files_differ_between_engines_is_refused():
    fleet = SteeredFleet()
    fleet.of_rank(1).digest = "other"
    assert "read different files" in fleet.run(A).message
    assert fleet.published.adapters == ()


def test_load_adapter_in_place_gets_a_new_number():
    fleet = SteeredFleet()
    fleet.run(A)
    assert "is loaded already, from /a" in fleet.run(LoadAdapter(name="a", path="/other")).message
    answer = fleet.run(LoadAdapter(name="a", path="/other", load_inplace=True))
    assert answer["number"] == 2
    assert [(adapter.path, adapter.number) for adapter in fleet.published.adapters] == [("/other", 2)]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LoadAdapter(name="c", path="/c"), "2 adapters are loaded, as many as option `max_loras` allows"),
        (LoadAdapter(name="model", path="/c"), "is the name of the model"),
        (LoadAdapter(name="", path="/c"), "needs a name and a directory"),
        (UnloadAdapter("c"), "there is no adapter 'c'; loaded: a, b"),
    ],
)
def test_adapter_calls_that_are_wrong_are_refused(request_, message):
    fleet = SteeredFleet()
    fleet.run(A)
    fleet.run(B)
    assert message in fleet.run(request_).message
    assert [name for name, _, _ in names(fleet.published)] == ["a", "b"]


def test_load_adapter_without_the_option_is_refused():
    assert "start with the option `enable_lora`" in SteeredFleet(max_adapters=0).run(A).message


def test_unload_adapter_leaves_the_others():
    fleet = SteeredFleet()
    fleet.run(A)
    fleet.run(B)
    assert fleet.run(UnloadAdapter("a"))["status"] == "ok"
    assert [engine.adapters for engine in fleet.engines.values()] == [[2], [2]]


def test_an_engine_that_starts_gets_the_adapters_before_it_joins():
    fleet = SteeredFleet()
    fleet.run(A)
    fleet.engine_exits(0)
    successor = fleet.attach_engine(0)
    assert names(successor.state) == [("a", 1, "d")]
    call = fleet.call(B)  # while it starts
    fleet.settle()
    assert fleet.outcome(call)["status"] == "ok"
    fleet.report_started(successor)
    assert not successor.has_joined
    fleet.settle()
    assert successor.has_joined and successor.adapters == [1, 2]


def test_an_engine_that_exits_during_a_load_is_not_waited_for():
    fleet = SteeredFleet()
    call = fleet.call(A)
    fleet.execute_next(0)
    fleet.engine_exits(1)
    fleet.settle()
    assert fleet.outcome(call)["status"] == "ok"


def test_load_adapter_without_any_engine_is_refused():
    fleet = SteeredFleet(num_engines=1)
    fleet.engine_exits(0)
    assert fleet.run(A).kind == "EnginesMissing"
    assert fleet.published.adapters == ()


@pytest.mark.parametrize(
    ("before", "is_allowed"),
    [(Pause(mode="keep"), True), (Sleep(tags=("weights",), level=1), False), (StartWeightUpdate(), False)],
)
def test_load_adapter_in_a_state_is_allowed_or_is_wrong_state(before, is_allowed):
    fleet = SteeredFleet()
    fleet.run(before)
    outcome = fleet.run(A)
    assert (outcome["status"] == "ok") if is_allowed else (outcome.kind == "WrongState")
    staged = [body for engine in fleet.engines.values() for body in engine.received if isinstance(body, StageAdapter)]
    assert bool(staged) == is_allowed
