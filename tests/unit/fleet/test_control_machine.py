"""The state machine of an instance: which call is allowed when, its outcome, and failures at chosen moments."""

from __future__ import annotations

import pytest
from control_fakes import SteeredFleet

from eagleray.identity import EngineId
from eagleray.messages.control import (
    AbortRequests,
    AbortWeightUpdate,
    CloseWeightTransfer,
    FetchWeights,
    FinishWeightUpdate,
    GetWeightInfo,
    InitWeightTransfer,
    InstanceState,
    OpenWeightTransfer,
    Pause,
    ReceiveWeights,
    ResetPrefixCache,
    Resume,
    SetState,
    SetWeightVersion,
    ShutdownWeightTransfer,
    Sleep,
    StartWeightUpdate,
    UpdateWeights,
    WakeUp,
)
from eagleray.messages.failure import Failure
from eagleray.messages.plain import pack, unpack

PUSH = UpdateWeights(update_info=pack({"names": ["a"]}))
ONE_SHOT = UpdateWeights(weight_dir="/checkpoint")
SLEEP = Sleep(tags=("weights", "kv_cache"), level=1)
CACHE_SLEEP = Sleep(tags=("kv_cache",), level=1)
CACHE = WakeUp(tags=("kv_cache",))

BEFORE = {
    "serving": [],
    "paused": [Pause(mode="keep")],
    "sleeping": [SLEEP],
    "updating": [StartWeightUpdate(), PUSH],
}
"""Calls that lead to each state."""

ALLOWED = {
    Pause(): "serving paused sleeping updating",
    Resume(): "serving paused",
    SLEEP: "serving paused sleeping",
    WakeUp(): "serving paused sleeping",
    CACHE: "serving paused sleeping updating",
    StartWeightUpdate(): "serving paused",
    PUSH: "updating",
    FinishWeightUpdate(): "updating",
    ONE_SHOT: "serving paused",
    ShutdownWeightTransfer(): "serving paused sleeping",
    SetWeightVersion("v"): "serving paused sleeping",
    ResetPrefixCache(): "serving paused sleeping updating",
    AbortRequests(): "serving paused sleeping updating",
    AbortWeightUpdate(): "serving paused sleeping updating",
    GetWeightInfo(): "serving paused sleeping updating",
}


@pytest.mark.parametrize("state", BEFORE)
@pytest.mark.parametrize("request_", ALLOWED, ids=lambda request: type(request).__name__)
def test_control_call_in_a_state_is_allowed_or_is_wrong_state(request_, state):
    fleet = SteeredFleet()
    for before in BEFORE[state]:
        assert not isinstance(fleet.run(before), Failure)
    assert fleet.control.state.name == state
    former = fleet.control.state
    outcome = fleet.run(request_)
    if state in ALLOWED[request_].split():
        assert not isinstance(outcome, Failure)
    else:
        assert outcome.kind == "WrongState"
        assert outcome.is_user_error
        assert "first" in outcome.message  # it names the call that ends the state
        assert fleet.control.state == former


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        ([Pause(), Resume()], "serving"),
        ([Pause(mode="wait"), Pause(mode="keep"), Resume()], "serving"),
        ([SLEEP, CACHE], "sleeping"),
        ([SLEEP, CACHE, WakeUp(tags=("weights",))], "serving"),
        ([Pause(), SLEEP, WakeUp()], "paused"),
        ([SLEEP, Pause(), WakeUp()], "paused"),
        ([StartWeightUpdate(), Pause(), PUSH, FinishWeightUpdate()], "paused"),
        ([Pause(), StartWeightUpdate(), PUSH, FinishWeightUpdate()], "paused"),
        ([StartWeightUpdate(), StartWeightUpdate()], "updating"),
        ([StartWeightUpdate(), PUSH, AbortWeightUpdate()], "serving"),
        ([CACHE_SLEEP, StartWeightUpdate(), PUSH, CACHE, FinishWeightUpdate()], "serving"),
        ([CACHE_SLEEP, ONE_SHOT], "sleeping"),
        ([ONE_SHOT], "serving"),
    ],
)
def test_control_calls_lead_to_state(calls, name):
    fleet = SteeredFleet()
    for request in calls:
        assert not isinstance(fleet.run(request), Failure)
    assert fleet.control.state.name == name
    assert {engine.state for engine in fleet.engines.values()} == {fleet.control.state}


def test_control_wrong_state_says_what_is_open_since_when():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    fleet.advance(12.0)
    assert fleet.run(Resume()).message == (
        "resume is not possible now: weight update 1 has been open for 12 s: call finish_weight_update or "
        "abort_weight_update first"
    )


# Answers.


def test_control_answers_sum_the_engines():
    fleet = SteeredFleet()
    assert fleet.run(Pause(mode="keep")) == {"status": "paused", "num_kept": 2, "num_aborted": 0}
    assert fleet.run(SLEEP) == {"status": "sleeping", "level": 1, "freed_bytes": 20}
    assert fleet.run(CACHE) == {"status": "sleeping", "tags": ["weights"]}
    assert fleet.run(WakeUp()) == {"status": "awake", "tags": []}
    assert fleet.run(Resume()) == {"status": "resumed"}
    assert fleet.run(AbortRequests()) == {"status": "aborted", "aborted": 6}
    assert fleet.run(ResetPrefixCache()) == {"success": True}
    assert fleet.run(SetWeightVersion("v")) == {"success": True, "new_version": "v"}


def test_control_pause_flags_follow_its_mode():
    fleet = SteeredFleet(1)
    for request in (Pause(), Pause(mode="wait"), Pause(mode="keep")):
        fleet.run(request)
    sent = [(body.state.pause, body.abort_running, body.clear_cache) for body in fleet.of_rank(0).received]
    assert sent == [("abort", True, True), ("wait", False, True), ("keep", False, False)]


def test_control_state_changes_while_a_pause_waits_it_waits_on():
    """The exit drops the update. The state without it ends the wait of the engine, and begins another."""
    fleet = SteeredFleet(shares_experts=True)
    fleet.run(StartWeightUpdate())
    fleet.of_rank(0).has_running = True
    pause = fleet.call(Pause(mode="wait"), timeout=60.0)
    fleet.settle()
    fleet.engine_exits(1)
    fleet.settle()
    assert fleet.of_rank(0).state == InstanceState(pause="wait")
    assert pause not in fleet.answers
    fleet.end_requests(0)
    assert fleet.outcome(pause)["status"] == "paused"


def test_control_sleep_that_waits_ends_requests_first():
    fleet = SteeredFleet(1)
    fleet.of_rank(0).has_running = True
    call = fleet.call(Sleep(tags=("kv_cache",), level=1, mode="wait"))
    fleet.settle()
    assert call not in fleet.answers
    fleet.end_requests(0)
    fleet.settle()
    assert fleet.outcome(call)["status"] == "sleeping"
    assert [body.state for body in fleet.of_rank(0).received] == [
        InstanceState(pause="wait"),
        InstanceState(asleep=("kv_cache",), sleep_level=1),
    ]


def test_control_update_in_steps_answers():
    fleet = SteeredFleet()
    assert fleet.run(StartWeightUpdate()) == {"message": "Weight update started", "update": 1}
    assert fleet.of_rank(0).received[-1] == SetState(state=InstanceState(open_update=1))
    assert fleet.run(PUSH) == {"message": "Weights updated", "num_tensors": 2, "num_bytes": 8}
    fleet.run(PUSH)
    finish = FinishWeightUpdate(weight_version="step-7")
    finished = {
        "message": "Weight update finished",
        "weight_version": "step-7",
        "update": 1,
        "num_tensors": 4,
        "num_missing": 2,
        "missing": ["a", "b"],
    }
    assert fleet.run(finish) == finished
    assert fleet.control.state == InstanceState(update=1, weight_version="step-7")
    assert fleet.run(finish) == finished  # repeated with another operation id
    assert fleet.run(FinishWeightUpdate(weight_version="step-8")).kind == "WrongState"


def test_control_finish_labels_a_one_shot_update():
    fleet = SteeredFleet()
    assert fleet.run(ONE_SHOT)["weight_version"] == "1"
    assert fleet.run(FinishWeightUpdate(weight_version="v"))["weight_version"] == "v"
    assert fleet.control.state == InstanceState(update=1, weight_version="v")


def test_control_weight_info_while_an_operation_runs():
    fleet = SteeredFleet()
    fleet.run(ONE_SHOT)
    fleet.call(Pause(mode="keep"), operation_id="mine")
    fleet.execute_next(0)
    fleet.advance(3.0)
    info = fleet.outcome(fleet.call(GetWeightInfo()))
    assert info["operation"] == {
        "name": "pause",
        "id": "mine",
        "seconds": 3.0,
        "members": {"engine-0": "done", "engine-1": "waiting"},
        "num_queued": 0,
    }
    assert (info["update"], info["required"], info["weight_version"], info["instance"]) == (1, 1, "1", "i")
    assert info["engines"][1] == {"rank": 1, "incarnation": 0, "weight_version": "1", "state": "ready"}


# Parts of an update by worker.


def test_control_update_info_list_is_divided_by_worker():
    fleet = SteeredFleet(2, workers=2)
    fleet.run(StartWeightUpdate())
    fleet.run(UpdateWeights(update_info=pack([{"part": rank} for rank in range(4)])))
    parts = [unpack(fleet.of_rank(rank).received[-1].update_info) for rank in (0, 1)]
    assert parts == [[{"part": 0}, {"part": 1}], [{"part": 2}, {"part": 3}]]


def test_control_update_info_list_of_wrong_length_is_refused_and_the_update_stays_open():
    fleet = SteeredFleet(2, workers=2)
    fleet.run(StartWeightUpdate())
    failure = fleet.run(UpdateWeights(update_info=pack([{}])))
    assert failure.kind == "InvalidRequest"
    assert "a list of 1, but there are 4 workers" in failure.message
    assert fleet.control.state.name == "updating"


def test_control_update_info_without_a_value_is_refused():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    assert fleet.run(UpdateWeights()).kind == "InvalidRequest"


def test_control_init_tells_each_engine_its_first_rank():
    fleet = SteeredFleet(2, workers=4)
    fleet.run(InitWeightTransfer(init_info={"port": 1}))
    sent = [fleet.of_rank(rank).received[-1] for rank in (0, 1)]
    assert sent == [OpenWeightTransfer(init_info={"port": 1}, first_rank=first) for first in (0, 4)]


# Repeated and cancelled calls.


def test_control_same_operation_id_is_one_operation():
    fleet = SteeredFleet()
    first = fleet.call(Pause(), operation_id="x")
    second = fleet.call(Pause(), operation_id="x", client=1)
    fleet.settle()
    third = fleet.call(Pause(), operation_id="x")
    assert len(fleet.of_rank(0).received) == 1
    assert fleet.outcome(first) == fleet.outcome(second) == fleet.outcome(third)
    assert fleet.run(Resume(), operation_id="x") == {"status": "resumed"}  # asks for something else
    fleet.run(Pause(), operation_id="x")
    assert fleet.control.state.name == "paused"  # the first outcome has been forgotten


def test_control_resume_that_is_forbidden_does_not_end_a_pause():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    pause = fleet.call(Pause(mode="keep"))
    resume = fleet.call(Resume())
    fleet.settle()
    assert fleet.outcome(pause)["status"] == "paused"
    assert fleet.outcome(resume).kind == "WrongState"


def test_control_one_shot_update_of_the_same_directory_joins():
    fleet = SteeredFleet()
    first, second = fleet.call(ONE_SHOT), fleet.call(ONE_SHOT, client=1)
    fleet.settle()
    assert fleet.outcome(first) == fleet.outcome(second)
    assert fleet.control.state.update == 1


def test_control_resume_ends_a_pause_that_waits():
    fleet = SteeredFleet()
    fleet.of_rank(0).has_running = True
    pause = fleet.call(Pause(mode="wait"))
    fleet.settle()
    assert pause not in fleet.answers
    assert fleet.run(Resume()) == {"status": "resumed"}
    assert fleet.outcome(pause).kind == "WrongState"
    assert fleet.of_rank(0).may_step


def test_control_caller_exits_its_operation_continues_and_a_repeat_gets_the_outcome():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    fleet.call(PUSH, client=1, operation_id="push")
    fleet.client_exits(1)
    fleet.settle()
    assert fleet.run(PUSH, operation_id="push") == {"message": "Weights updated", "num_tensors": 2, "num_bytes": 8}
    assert sum(isinstance(body, ReceiveWeights) for body in fleet.of_rank(0).received) == 1


# Deadlines.


def test_control_deadline_names_the_engines_and_the_pause_stays():
    fleet = SteeredFleet()
    call = fleet.call(Pause(mode="keep"), timeout=5.0)
    fleet.execute_next(0)
    fleet.advance(5.0)
    assert fleet.outcome(call).kind == "DeadlineExceeded"
    assert fleet.outcome(call).message == "pause: time limit reached: engine-1 has not replied"
    fleet.settle()
    assert fleet.of_rank(1).state == fleet.control.state == InstanceState(pause="keep")


def test_control_deadline_of_a_queued_call_names_the_one_before():
    fleet = SteeredFleet()
    fleet.call(Pause(mode="keep"), operation_id="slow")
    queued = fleet.call(ResetPrefixCache(), timeout=4.0)
    fleet.advance(4.0)
    assert fleet.outcome(queued).message == (
        "reset_prefix_cache: time limit reached: it waits for pause (operation slow), which has run for 4 s"
    )


def test_control_trainer_is_silent_update_is_aborted_and_its_next_call_says_so():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    fleet.advance(299.0)
    fleet.run(PUSH)
    fleet.run(ResetPrefixCache())
    fleet.advance(301.0)
    fleet.settle()
    assert fleet.control.state == InstanceState()
    assert [engine.staged for engine in fleet.engines.values()] == [None, None]
    failure = fleet.run(PUSH)
    assert failure.kind == "WrongState"
    assert "no call of it came for 300 s" in failure.message
    assert fleet.run(StartWeightUpdate())["update"] == 1


# Failures.


def test_control_refused_weights_nothing_changes_and_finish_says_so_too():
    fleet = SteeredFleet()
    fleet.run(ONE_SHOT)
    fleet.run(StartWeightUpdate())
    call = fleet.call(PUSH)
    fleet.execute_next(0)
    fleet.execute_next(1, Failure(kind="WeightsMismatch", message="tensor 'a' is [2], not [3]", is_user_error=True))
    fleet.settle()
    cause = "tensor 'a' is [2], not [3]"
    later = f"the weight update was dropped: {cause}; start another one and push all tensors again"
    for failure, message in (
        (fleet.outcome(call), cause),
        (fleet.run(PUSH), later),
        (fleet.run(FinishWeightUpdate()), later),
    ):
        assert (failure.kind, failure.message) == ("WeightsMismatch", message)
    assert fleet.control.state == InstanceState(update=1, weight_version="1")
    assert [engine.staged for engine in fleet.engines.values()] == [None, None]


def test_control_engine_fails_to_pause_state_is_restored():
    fleet = SteeredFleet()
    call = fleet.call(Pause(mode="keep"))
    fleet.execute_next(0)
    fleet.execute_next(1, Failure(kind="MemoryError", message="no memory"))
    fleet.settle()
    assert fleet.outcome(call).message == "engine-1: no memory"
    assert {engine.state for engine in fleet.engines.values()} == {InstanceState()}


def test_control_engine_exits_before_the_commit_the_other_commits_and_the_successor_copies():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    fleet.run(PUSH)
    fleet.engine_exits(1)
    successor = fleet.start_engine(1)
    fleet.settle()
    assert not successor.has_joined  # it could not have the weights after the commit
    assert fleet.run(FinishWeightUpdate())["update"] == 1
    assert FetchWeights(update=1, handles=[b"weights"]) in successor.received
    assert successor.has_joined


def test_control_update_is_aborted_successor_with_the_old_weights_joins():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    fleet.engine_exits(1)
    successor = fleet.start_engine(1)
    fleet.settle()
    assert not successor.has_joined
    fleet.run(AbortWeightUpdate())
    assert successor.has_joined


def test_control_engine_that_waits_for_weights_takes_a_complete_push():
    fleet = SteeredFleet(1)
    fleet.run(ONE_SHOT)
    fleet.engine_exits(0)
    successor = fleet.start_engine(0)
    assert not successor.has_joined
    fleet.run(StartWeightUpdate())
    fleet.run(PUSH)
    fleet.run(FinishWeightUpdate())
    assert successor.has_joined
    assert next(body for body in successor.received if hasattr(body, "require_complete")).require_complete


def test_control_finish_of_an_update_without_weights_is_refused():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    assert fleet.run(FinishWeightUpdate()).kind == "WeightsMismatch"
    assert fleet.control.state == InstanceState()


def test_control_all_engines_exit_update_is_dropped():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    fleet.engine_exits(0)
    fleet.engine_exits(1, "it was killed by SIGKILL")
    assert fleet.control.state == InstanceState()
    failure = fleet.run(PUSH)
    assert failure.kind == "EnginesMissing"
    assert "engine-1 ended: it was killed by SIGKILL" in failure.message


@pytest.mark.parametrize("shares_experts", [False, True])
def test_control_all_engines_exit_after_their_checks_nothing_is_committed(shares_experts):
    """Weights that no engine has must not become those that are required."""
    fleet = SteeredFleet(shares_experts=shares_experts)
    fleet.run(StartWeightUpdate())
    fleet.run(PUSH)
    call = fleet.call(FinishWeightUpdate())
    fleet.execute_next(0)
    if shares_experts:
        fleet.execute_next(1)
    fleet.engine_exits(0)
    fleet.engine_exits(1, "it was killed by SIGKILL")
    failure = fleet.outcome(call)
    assert failure.kind == "EnginesMissing"
    cause = "engine-0 ended: it was killed" if shares_experts else "engine-1 ended: it was killed by SIGKILL"
    assert cause in failure.message
    assert fleet.control.state == InstanceState()


@pytest.mark.parametrize("num_executed", range(4))
def test_control_expert_group_loses_an_engine_before_the_commit_old_weights_serve_on(num_executed):
    """No other engine has its experts, so after a commit the group would wait for another complete update."""
    fleet = SteeredFleet(shares_experts=True)
    fleet.run(StartWeightUpdate())
    fleet.run(PUSH)
    call = fleet.call(FinishWeightUpdate())
    for step in range(num_executed):  # the checks, then the stop of the first engine
        fleet.execute_next(step % 2)
    fleet.engine_exits(1, "it was killed by SIGKILL")
    fleet.settle()
    failure = fleet.outcome(call)
    assert failure.kind == "EnginesMissing"
    assert "engine-1 ended: it was killed by SIGKILL" in failure.message
    assert fleet.control.state == InstanceState()
    assert fleet.of_rank(0).staged is None
    successor = fleet.start_engine(1)
    assert successor.may_step and fleet.of_rank(0).may_step


@pytest.mark.parametrize("starts_again", [False, True])
def test_control_expert_group_loses_an_engine_between_calls_the_update_is_dropped(starts_again):
    fleet = SteeredFleet(shares_experts=True)
    fleet.run(StartWeightUpdate())
    fleet.run(PUSH)
    fleet.engine_exits(1, "it was killed by SIGKILL")
    if starts_again:
        fleet.start_engine(1)
    fleet.settle()
    assert fleet.control.state == InstanceState()
    assert "it was killed by SIGKILL" in fleet.run(FinishWeightUpdate()).message


def test_control_expert_group_without_an_engine_no_update_is_opened():
    fleet = SteeredFleet(shares_experts=True)
    fleet.engine_exits(1, "it was killed by SIGKILL")
    failure = fleet.run(StartWeightUpdate())
    assert failure.kind == "EnginesMissing"
    assert "engine 1 is missing: it was killed by SIGKILL" in failure.message
    fleet.start_engine(1)
    assert fleet.run(StartWeightUpdate())["update"] == 1


def test_control_engine_exits_in_a_collective_transfer_breaks_at_once():
    fleet = SteeredFleet()
    fleet.run(InitWeightTransfer(init_info={}))
    fleet.run(StartWeightUpdate())
    call = fleet.call(PUSH)
    fleet.engine_exits(1, "it was killed")
    assert fleet.outcome(call).kind == "TransferBroken"
    assert "engine-1 ended: it was killed" in fleet.outcome(call).message
    fleet.settle()
    assert not fleet.of_rank(0).has_transfer
    assert fleet.of_rank(0).staged is None
    assert fleet.control.state == InstanceState()


def test_control_engine_is_replaced_a_collective_transfer_breaks():
    fleet = SteeredFleet()
    fleet.run(InitWeightTransfer(init_info={}))
    fleet.run(StartWeightUpdate())
    fleet.call(AbortWeightUpdate())
    fleet.execute_next(1, Failure(kind="RuntimeError", message="a device failed"))
    assert list(fleet.engines) == [EngineId("i", 0)]
    fleet.settle()
    assert not fleet.of_rank(0).has_transfer
    fleet.run(StartWeightUpdate())
    assert fleet.run(PUSH).kind == "TransferBroken"


def test_control_engine_exits_between_calls_of_a_collective_transfer_next_push_is_refused():
    fleet = SteeredFleet()
    fleet.run(InitWeightTransfer(init_info={}))
    fleet.engine_exits(1)
    fleet.run(StartWeightUpdate())
    failure = fleet.run(PUSH)
    assert failure.kind == "TransferBroken"
    assert "call init_weight_transfer_engine again" in failure.message


def test_control_init_waits_for_all_engines_and_closes_the_earlier_transfer():
    fleet = SteeredFleet()
    fleet.run(InitWeightTransfer(init_info={}))
    fleet.engine_exits(1)
    call = fleet.call(InitWeightTransfer(init_info={}))
    fleet.settle()
    assert call not in fleet.answers
    fleet.start_engine(1)
    fleet.settle()
    assert fleet.outcome(call) == {"message": "Weight transfer initialized"}
    assert all(engine.has_transfer for engine in fleet.engines.values())
    assert CloseWeightTransfer() in fleet.of_rank(0).received


@pytest.mark.parametrize("returns", [True, False])
def test_control_init_without_an_engine_names_it(returns):
    fleet = SteeredFleet()
    fleet.engine_exits(1, "it was killed", returns=returns)
    call = fleet.call(InitWeightTransfer(init_info={}), timeout=9.0)
    assert (call in fleet.answers) == (not returns)
    fleet.advance(9.0)
    assert fleet.outcome(call).kind == "EnginesMissing"
    assert "engine 1 is missing: it was killed" in fleet.outcome(call).message


def test_control_abort_ends_a_push_that_hangs():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    push, abort = fleet.call(PUSH), fleet.call(AbortWeightUpdate())
    assert fleet.outcome(push).kind == "WrongState"
    fleet.settle()
    assert fleet.outcome(abort) == {"message": "Weight update aborted", "update": 0}


def test_control_engine_cannot_apply_the_commit_is_replaced():
    fleet = SteeredFleet()
    fleet.run(StartWeightUpdate())
    fleet.run(PUSH)
    call = fleet.call(FinishWeightUpdate())
    for rank in (0, 1, 0):
        fleet.execute_next(rank)
    fleet.execute_next(1, Failure(kind="RuntimeError", message="a device failed"))
    assert fleet.outcome(call)["update"] == 1
    assert list(fleet.engines) == [EngineId("i", 0)]


def test_control_expert_group_steps_with_one_version():
    fleet = SteeredFleet(shares_experts=True)
    fleet.run(StartWeightUpdate())
    fleet.run(PUSH)
    fleet.run(FinishWeightUpdate())
    states = [(body.state.is_held, body.state.update) for body in fleet.of_rank(0).received if hasattr(body, "state")]
    assert states == [(False, 0), (True, 0), (True, 1), (False, 1)]


def test_control_expert_group_sleeps_and_wakes_while_no_engine_steps():
    """While the memory of an engine changes, none may step: not before all have stopped, nor until all are awake."""
    fleet = SteeredFleet(shares_experts=True)
    fleet.run(Sleep(tags=("weights",), level=1, mode="keep"))
    fleet.run(WakeUp())
    states = [body.state for body in fleet.of_rank(0).received if hasattr(body, "state")]
    assert [(state.is_held, state.asleep) for state in states] == [
        (True, ()),
        (False, ("weights",)),
        (True, ()),
        (False, ()),
    ]
