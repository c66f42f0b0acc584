"""Sources of weights for engines that lack them, as `Control` chooses them."""

from __future__ import annotations

import pytest
from control_fakes import SteeredFleet

from eagleray.fleet import timeouts
from eagleray.messages.control import (
    AbortWeightUpdate,
    CheckWeights,
    CommandDone,
    FetchWeights,
    FinishWeightUpdate,
    GetWeightInfo,
    InstanceState,
    Pause,
    ReceiveWeights,
    ResetPrefixCache,
    ServeWeights,
    SetWeightVersion,
    Sleep,
    StartWeightUpdate,
    UpdateWeights,
)
from eagleray.messages.failure import Failure
from eagleray.messages.plain import pack

PUSH = UpdateWeights(update_info=pack({"names": ["a"]}))
FAILED = Failure(kind="TransferBroken", message="the connection was closed")
COPY = FetchWeights(update=1, handles=[b"weights"])


def updated_fleet(num_engines: int = 2, **options) -> SteeredFleet:
    """Return a fleet that has had one update by a trainer."""
    fleet = SteeredFleet(num_engines, **options)
    for request in (StartWeightUpdate(), PUSH, FinishWeightUpdate()):
        fleet.run(request)
    return fleet


def commands(engine, *kinds):
    return [body for body in engine.received if isinstance(body, kinds)]


def answer(fleet: SteeredFleet, rank: int, *, failure: Failure | None = None, **result) -> None:
    """Have an engine reply to its next command without executing it."""
    engine = fleet.of_rank(rank)
    command = engine.inbox.pop(0)
    engine.received.append(command.body)
    fleet.deliver(CommandDone(member=engine.engine, number=command.number, result=result, failure=failure))


def states(fleet: SteeredFleet) -> list[str]:
    return [it["state"] for it in fleet.outcome(fleet.call(GetWeightInfo()))["engines"]]


def test_successor_copies_from_a_living_engine_and_joins():
    fleet = updated_fleet()
    fleet.engine_exits(1)
    successor = fleet.start_engine(1)
    assert states(fleet) == ["ready", "waiting"]
    fleet.settle()
    assert commands(fleet.of_rank(0), ServeWeights) == [ServeWeights(update=1)]
    assert commands(successor, FetchWeights) == [COPY]
    assert successor.has_joined and states(fleet) == ["ready", "ready"]


@pytest.mark.parametrize("fails", ["offer", "copy"])
def test_source_fails_the_next_one_is_taken(fails):
    fleet = updated_fleet(3)
    fleet.engine_exits(2)
    successor = fleet.start_engine(2)
    if fails == "copy":
        fleet.execute_next(0)
        answer(fleet, 2, failure=FAILED)
    else:
        answer(fleet, 0, failure=FAILED)
    fleet.settle()
    assert commands(fleet.of_rank(1), ServeWeights) == [ServeWeights(update=1)]
    assert successor.has_joined


def test_all_sources_fail_they_are_tried_again_later():
    fleet = updated_fleet()
    fleet.engine_exits(1)
    successor = fleet.start_engine(1)
    answer(fleet, 0, failure=FAILED)
    fleet.settle()
    assert not successor.has_joined
    fleet.advance(timeouts.FETCH_RETRY_SECONDS)
    fleet.settle()
    assert successor.has_joined


def test_source_exits_before_it_has_replied_the_next_one_is_taken():
    fleet = updated_fleet(3)
    fleet.engine_exits(2)
    successor = fleet.start_engine(2)
    fleet.engine_exits(0)
    fleet.settle()
    assert commands(fleet.of_rank(1), ServeWeights) == [ServeWeights(update=1)]
    assert successor.has_joined


@pytest.mark.parametrize("is_complete", [False, True])
def test_source_exits_during_the_copy_it_is_broken_off(is_complete):
    """A host that vanishes does not close its connections. The copy may have been completed just before."""
    fleet = updated_fleet(3)
    fleet.engine_exits(2)
    successor = fleet.start_engine(2)
    fleet.execute_next(0)
    fleet.engine_exits(0)
    assert [command.body for command in successor.inbox] == [COPY, AbortWeightUpdate()]
    answer(fleet, 2, **({"update": 1} if is_complete else {"failure": FAILED}))
    successor.update = 1 if is_complete else None
    fleet.settle()
    assert commands(fleet.of_rank(1), ServeWeights) == ([] if is_complete else [ServeWeights(update=1)])
    assert successor.has_joined


def test_source_exits_during_the_copy_an_update_goes_on_without_the_successor():
    fleet = updated_fleet(3)
    fleet.engine_exits(2)
    successor = fleet.start_engine(2)
    fleet.execute_next(0)
    start = fleet.call(StartWeightUpdate())
    fleet.engine_exits(0)
    answer(fleet, 2, failure=FAILED)
    fleet.settle()
    assert fleet.outcome(start)["update"] == 2
    fleet.run(PUSH)
    assert fleet.run(FinishWeightUpdate())["update"] == 2
    assert commands(successor, ReceiveWeights) == [] and successor.has_joined and successor.update == 2


@pytest.mark.parametrize("request_", [Pause(mode="keep"), ResetPrefixCache(), SetWeightVersion("v")])
def test_call_during_a_copy_does_not_wait_for_the_successor(request_):
    """It has no requests, and adopts the state of the instance before it gets any."""
    fleet = updated_fleet()
    fleet.engine_exits(1)
    successor = fleet.start_engine(1)
    fleet.execute_next(0)
    call = fleet.call(request_)
    fleet.execute_next(0)
    assert not isinstance(fleet.outcome(call), Failure)
    fleet.settle()
    assert successor.has_joined and successor.state == fleet.of_rank(0).state == fleet.control.state


def test_sleep_during_a_copy_waits_until_the_successor_has_freed_its_memory():
    fleet = updated_fleet()
    fleet.engine_exits(1)
    successor = fleet.start_engine(1)
    fleet.execute_next(0)
    call = fleet.call(Sleep(tags=("weights", "kv_cache"), level=2))
    fleet.execute_next(0)
    assert call not in fleet.answers
    fleet.settle()
    assert fleet.outcome(call)["status"] == "sleeping" and successor.update is None


def test_update_is_finished_during_a_copy_without_the_successor():
    fleet = updated_fleet()
    fleet.engine_exits(1)
    fleet.run(StartWeightUpdate())
    fleet.run(PUSH)
    successor = fleet.start_engine(1)
    fleet.execute_next(0)
    assert [command.body for command in successor.inbox] == [COPY]
    call = fleet.call(FinishWeightUpdate())
    fleet.execute_next(0)
    fleet.execute_next(0)
    assert fleet.outcome(call)["update"] == 2
    fleet.settle()
    assert successor.has_joined and successor.update == 2


def test_update_starts_before_the_source_has_replied_nothing_is_copied_over_it():
    fleet = updated_fleet()
    fleet.engine_exits(1)
    successor = fleet.start_engine(1)
    start = fleet.call(StartWeightUpdate())
    fleet.execute_next(1)
    fleet.settle()
    assert fleet.outcome(start)["update"] == 2
    assert commands(successor, FetchWeights) == []
    fleet.run(PUSH)
    fleet.run(FinishWeightUpdate())
    assert commands(successor, CheckWeights) == [CheckWeights(require_complete=True)]
    assert successor.has_joined and successor.update == 2


def test_no_source_successor_waits_and_joins_when_one_is_there():
    fleet = updated_fleet(1)
    fleet.engine_exits(0)
    successor = fleet.start_engine(0)
    fleet.settle()
    assert not successor.has_joined and states(fleet) == ["waiting"]
    assert commands(successor, FetchWeights) == []


def test_engines_that_share_experts_stop_until_a_complete_push():
    fleet = updated_fleet(shares_experts=True)
    survivor = fleet.of_rank(0)
    assert survivor.may_step
    fleet.engine_exits(1)
    fleet.settle()
    assert not survivor.state.may_step, "the successor would compute with other weights"
    successor = fleet.start_engine(1)
    assert not successor.state.may_step
    fleet.settle()
    assert commands(survivor, ServeWeights) == [] and not successor.has_joined
    for request in (StartWeightUpdate(), PUSH, FinishWeightUpdate()):
        fleet.run(request)
    assert commands(successor, CheckWeights) == [CheckWeights(require_complete=True)]
    assert successor.has_joined and survivor.state.may_step and successor.state.may_step


@pytest.mark.parametrize("shares_experts", [False, True])
@pytest.mark.parametrize(("missing", "has_source"), [([], True), (["up"], False)])
def test_directory_that_had_all_weights_is_a_source(missing, has_source, shares_experts):
    fleet = SteeredFleet(1, shares_experts=shares_experts)
    call = fleet.call(UpdateWeights(weight_dir="/checkpoints/7"))
    fleet.execute_next(0)
    answer(fleet, 0, num_tensors=2, num_bytes=8, fingerprint="f")
    fleet.of_rank(0).staged = 1
    answer(fleet, 0, missing=missing, num_missing=len(missing))
    fleet.settle()
    assert fleet.outcome(call)["update"] == 1
    fleet.engine_exits(0)
    successor = fleet.start_engine(0)
    fleet.settle()
    expected = [FetchWeights(update=1, weight_dir="/checkpoints/7", fingerprint="f")] if has_source else []
    assert commands(successor, FetchWeights) == expected
    assert successor.has_joined is has_source
    assert successor.state.may_step is (has_source or not shares_experts)


def test_engine_whose_weights_were_dropped_gets_them_after_waking():
    fleet = updated_fleet()
    engine = fleet.of_rank(1)
    engine.update = None
    fleet.control._instance.engines[engine.engine].update = None
    fleet.control._instance.assign(InstanceState(update=1, asleep=("weights",), sleep_level=2))
    fleet.run(GetWeightInfo())
    assert commands(engine, FetchWeights) == []
    fleet.control._instance.assign(InstanceState(update=1))
    fleet.run(GetWeightInfo())
    assert commands(engine, FetchWeights) == [COPY]
    assert engine.update == 1


def test_no_engine_has_weights_none_may_step_until_an_update():
    fleet = updated_fleet()
    for engine in (fleet.of_rank(0), fleet.of_rank(1)):
        engine.update = fleet.control._instance.engines[engine.engine].update = None
    fleet.run(GetWeightInfo())
    assert fleet.control.state.lacks_weights and not fleet.of_rank(0).state.may_step
    for request in (StartWeightUpdate(), PUSH, FinishWeightUpdate()):
        fleet.run(request)
    assert not fleet.control.state.lacks_weights
    assert all(fleet.of_rank(rank).state.may_step and fleet.of_rank(rank).update == 2 for rank in (0, 1))
