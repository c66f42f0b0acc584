"""The state machine of an instance under random calls, replies, failures, exits and delays."""

from __future__ import annotations

import pytest
from control_fakes import SteeredFleet
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from eagleray.messages.control import (
    AbortRequests,
    AbortWeightUpdate,
    FinishWeightUpdate,
    GetWeightInfo,
    InitWeightTransfer,
    Pause,
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
from eagleray.messages.plain import pack

REQUESTS = [
    *(Pause(mode=mode) for mode in ("abort", "wait", "keep")),
    Resume(),
    Sleep(tags=("weights", "kv_cache"), level=2),
    Sleep(tags=("kv_cache",), level=1, mode="wait"),
    WakeUp(),
    WakeUp(tags=("kv_cache",)),
    ResetPrefixCache(),
    AbortRequests(),
    InitWeightTransfer(init_info={}),
    ShutdownWeightTransfer(),
    StartWeightUpdate(),
    UpdateWeights(update_info=pack({"names": ["a"]})),
    UpdateWeights(weight_dir="/other"),
    FinishWeightUpdate(),
    FinishWeightUpdate(weight_version="v"),
    AbortWeightUpdate(),
    SetWeightVersion("w"),
    GetWeightInfo(),
]
ONE_SHOT = UpdateWeights(weight_dir="/checkpoint")
UPDATE = [StartWeightUpdate(), UpdateWeights(update_info=pack({})), FinishWeightUpdate()]
RANKS = st.integers(0, 1)
FAILURES = st.sampled_from(
    [
        Failure(kind="WeightsMismatch", message="a has the wrong shape", is_user_error=True),
        Failure(kind="TransferBroken", message="the trainer is gone"),
        Failure(kind="KeyError", message="'a'"),
    ]
)


class InstanceMachine(RuleBasedStateMachine):
    shares_experts = False

    @initialize()
    def start(self):
        self.fleet = SteeredFleet(2, shares_experts=self.shares_experts)

    @rule(
        request=st.sampled_from(REQUESTS),
        client=st.integers(0, 1),
        timeout=st.sampled_from([0.5, 5.0, 1000.0]),
        operation_id=st.sampled_from([None, None, None, "same"]),
    )
    def call(self, request, client, timeout, operation_id):
        self.fleet.call(request, client=client, timeout=timeout, operation_id=operation_id)

    @rule(
        requests=st.sampled_from([UPDATE[:1], UPDATE[:2], UPDATE, UPDATE, [ONE_SHOT], [Resume()], [WakeUp()]]),
        num_steps=st.integers(0, 5),
    )
    def calls_until_a_step_of_the_last_one_are_executed(self, requests, num_steps):
        """Make calls one after the other. Of the last one, engines execute this number of commands in turn."""
        for request in requests[:-1]:
            self.fleet.call(request)
            self.fleet.settle()
        self.fleet.call(requests[-1])
        for step in range(num_steps):
            if self.is_there(step % 2):
                self.fleet.execute_next(step % 2)

    @rule()
    def members_execute_all(self):
        self.fleet.settle()

    @rule(rank=RANKS, count=st.integers(1, 3))
    def engine_executes(self, rank, count):
        for _ in range(count):
            if self.is_there(rank):
                self.fleet.execute_next(rank)

    @rule(rank=RANKS, failure=FAILURES)
    def engine_fails_to_execute(self, rank, failure):
        if self.is_there(rank):
            self.fleet.execute_next(rank, failure)

    @rule(index=st.integers(0, 1))
    def client_executes(self, index):
        self.fleet.client_executes_next(index)

    @rule(rank=RANKS, is_running=st.booleans())
    def requests_begin_or_end(self, rank, is_running):
        if not self.is_there(rank):
            return
        if is_running:
            self.fleet.of_rank(rank).has_running = True
        else:
            self.fleet.end_requests(rank)

    @rule(rank=RANKS)
    def engine_exits(self, rank):
        if self.is_there(rank):
            self.fleet.engine_exits(rank)

    @rule(rank=RANKS, returns=st.booleans())
    def engine_is_attached(self, rank, returns):
        if not self.is_there(rank):
            self.fleet.attach_engine(rank)

    @rule(rank=RANKS, copies=st.booleans())
    def engine_starts(self, rank, copies):
        """Start an engine with the weights of the checkpoint, or with those of the other engine."""
        if self.is_there(rank) and not self.fleet.of_rank(rank).is_started:
            update = self.fleet.of_rank(1 - rank).update if copies and self.is_there(1 - rank) else 0
            self.fleet.report_started(self.fleet.of_rank(rank), update)

    @rule()
    def client_exits(self):
        self.fleet.client_exits(1)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 301.0]))
    def time_passes(self, seconds):
        self.fleet.advance(seconds)

    def is_there(self, rank):
        return any(engine.engine.rank == rank for engine in self.fleet.engines.values())

    @invariant()
    def no_call_waits_beyond_its_deadline(self):
        assert all(deadline > self.fleet.now for _, deadline in self.fleet.open_calls.values())

    @invariant()
    def engines_that_step_have_the_weights_of_their_state(self):
        for engine in self.fleet.engines.values():
            if engine.may_step:
                assert engine.update == engine.state.update

    @invariant()
    def engines_of_an_expert_group_step_with_the_same_weights(self):
        if self.shares_experts:
            assert len({engine.update for engine in self.fleet.engines.values() if engine.may_step}) <= 1

    @invariant()
    def published_state_is_the_state(self):
        assert self.fleet.published == self.fleet.control.state

    def teardown(self):
        fleet = self.fleet
        for engine in list(fleet.engines.values()):
            if not engine.is_started:
                fleet.report_started(engine, fleet.control.state.update)
            if self.is_there(engine.engine.rank):
                fleet.end_requests(engine.engine.rank)
        for _ in range(3):
            fleet.settle()
            fleet.advance(2000.0)
        assert not fleet.open_calls
        assert fleet.control.state.open_update is None
        for engine in fleet.engines.values():
            assert engine.state == fleet.control.state
            assert engine.has_joined or engine.update != fleet.control.state.update
            assert not engine.has_joined or engine.update in (None, fleet.control.state.update)
            assert engine.staged is None
        last = fleet.call(GetWeightInfo())
        assert fleet.outcome(last)["operation"] is None


class ExpertGroupMachine(InstanceMachine):
    shares_experts = True


SETTINGS = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("machine", [InstanceMachine, ExpertGroupMachine])
def test_control_random_events_every_call_is_answered_and_engines_agree(machine):
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_control_engine_that_fails_before_the_deadline_of_others_is_replaced():
    fleet = SteeredFleet(2)
    paused = fleet.call(Pause(mode="abort"), timeout=0.5)
    engine = fleet.of_rank(0).engine
    fleet.execute_next(0, Failure(kind="KeyError", message="'a'"))
    assert engine in fleet.engines
    fleet.advance(1.0)
    assert "time limit reached" in str(fleet.answers[paused])
    assert engine not in fleet.engines and fleet.control.state.pause == "abort"


def test_control_engine_that_failed_once_is_not_replaced_for_an_equal_state_later():
    fleet = SteeredFleet(2)
    fleet.call(Pause(mode="abort"))
    fleet.execute_next(0, Failure(kind="KeyError", message="'a'"))
    fleet.execute_next(1)
    fleet.settle()  # the pause failed, and the former state was restored
    engine, again = fleet.of_rank(0).engine, fleet.call(Pause(mode="abort"), timeout=0.5)
    fleet.execute_next(0)
    fleet.advance(1.0)
    assert "time limit reached" in str(fleet.answers[again])
    assert engine in fleet.engines


def test_control_commands_of_an_operation_follow_those_of_the_one_before():
    fleet = SteeredFleet(1)
    first, second = fleet.call(Pause(mode="keep")), fleet.call(ResetPrefixCache())
    assert [command.body for command in fleet.of_rank(0).inbox] == [SetState(state=fleet.control.state)]
    fleet.execute_next(0)
    assert first in fleet.answers
    assert [command.body for command in fleet.of_rank(0).inbox] == [ResetPrefixCache()]
    fleet.execute_next(0)
    assert second in fleet.answers
