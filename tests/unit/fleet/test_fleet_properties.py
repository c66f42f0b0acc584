"""The fleet's state machine under random failures, scaling, control calls, late messages and passing of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from fleet_machine import OBSERVER
from fleet_world import CAUSES, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from eagleray.fleet.events import (
    Disconnected,
    KillInstance,
    Silent,
    StartApiServers,
    StartEngines,
    StopInstance,
    TimePassed,
)
from eagleray.fleet.external_clients import is_external
from eagleray.identity import ClientId, EngineId
from eagleray.messages.control import (
    AbortRequests,
    GetWeightInfo,
    InitWeightTransfer,
    Pause,
    ResetPrefixCache,
    Resume,
    ShutdownWeightTransfer,
)
from eagleray.messages.lifecycle import Alive, Unreachable
from eagleray.messages.scaling import Drained, GetScaling, RestartEngines, Scale

CALLS = [
    Pause(mode="abort"),
    Pause(mode="keep"),
    Resume(),
    ResetPrefixCache(),
    AbortRequests(),
    InitWeightTransfer(init_info={}),
    ShutdownWeightTransfer(),
    GetWeightInfo(),
    GetScaling(),
]
INDEX = st.integers(0, 5)
IDS = st.sampled_from([None, None, None, "a", "b"])
TIMEOUTS = st.sampled_from([600.0, 600.0, 1.0])
RANKS = st.sets(st.integers(0, 3), max_size=2).map(lambda ranks: tuple(sorted(ranks)))
DRAINS = st.sampled_from([0.0, 0.0, 30.0])

Item = TypeVar("Item")


def pick(items: Sequence[Item], index: int) -> list[Item]:
    """Return one of the items, in a list; an empty one if there are none."""
    return [items[index % len(items)]] if items else []


class FleetMachine(RuleBasedStateMachine):
    @initialize(
        engines=st.integers(1, 3),
        servers=st.integers(1, 2),
        restarts=st.sampled_from([5, 5, 1, 0]),
        is_serving=st.booleans(),
        shares_experts=st.booleans(),
    )
    def begin(self, engines, servers, restarts, is_serving, shares_experts):
        self.world = World(
            data_parallel_size=engines,
            api_server_count=servers,
            max_engine_restarts=restarts,
            enable_expert_parallel=shares_experts and engines > 1,
        )
        if is_serving:
            self.world.boot()
            return
        self.world.handle(StartEngines(tuple(range(engines))))
        self.world.handle(StartApiServers(tuple(range(servers))))
        self.world.adopt()

    # Processes.

    @rule(index=INDEX)
    def process_binds(self, index):
        waiting = [member for member in self.world.running if member not in self.world.bound | self.world.hung]
        for member in pick(waiting, index):
            self.world.bind(member)

    @rule(index=INDEX)
    def member_starts(self, index):
        waiting = [it for it in self.world.attached if it not in self.world.started | self.world.hung]
        for member in pick(waiting, index):
            self.world.start(member)

    @rule()
    def clients_confirm(self):
        self.world.confirm()

    @rule()
    def everything_comes_up(self):
        for _ in range(2):
            for member in list(self.world.running):
                if member not in self.world.hung:
                    self.world.bind(member)
                    self.world.start(member)
            while any(self.world.advance(engine) for engine in list(self.world.attached)):
                pass
        self.world.confirm()

    @rule(index=INDEX, cause=st.sampled_from([*CAUSES]))
    def process_exits(self, index, cause):
        for member in pick(list(self.world.running), index):
            self.world.end(member, CAUSES[cause])

    @rule()
    def processes_exit_that_were_told_to(self):
        world = self.world
        for member, signals in list(world.running.items()):
            is_willing = member not in world.hung and (member in world.told_to_stop or signals)
            if is_willing or member in world.failing or "kill" in signals:
                world.end(member, CAUSES["signal"])

    @rule(index=INDEX, cause=st.sampled_from(["bug", "other bug", "user error"]))
    def process_fails_and_has_not_exited(self, index, cause):
        for member in pick(list(self.world.running), index):
            self.world.report_failure(member, CAUSES[cause])

    @rule(index=INDEX)
    def process_hangs(self, index):
        for member in pick(list(self.world.running), index):
            self.world.hung.add(member)
            if member in self.world.started and member in self.world.attached:
                self.world.handle(Silent(member, 10.0))

    @rule(index=INDEX)
    def engine_forms_its_group(self, index):
        for engine in pick([engine for engine in self.world.attached if isinstance(engine, EngineId)], index):
            self.world.advance(engine)

    @rule(index=INDEX)
    def group_of_engine_breaks(self, index):
        for engine in pick([engine for engine in self.world.attached if isinstance(engine, EngineId)], index):
            self.world.find_broken(engine)

    # Connections and messages.

    @rule(one=INDEX, other=INDEX)
    def connection_breaks(self, one, other):
        for sender, receiver in zip(
            pick(list(self.world.attached), one), pick(list(self.world.attached), other), strict=True
        ):
            self.world.handle(Disconnected(receiver) if sender == receiver else Unreachable(sender, receiver))

    @rule(index=st.integers(0, 1000))
    def message_arrives_again(self, index):
        for message in pick(self.world.messages, index):
            self.world.handle(message)

    # Clients.

    @rule(
        index=st.integers(0, 1),
        lease=st.sampled_from([5.0, 100.0, -1.0]),
        is_reachable=st.sampled_from([True, True, False]),
    )
    def external_client_registers(self, index, lease, is_reachable):
        self.world.register(f"of external client {index}", lease, is_reachable=is_reachable)

    @rule(index=INDEX)
    def external_client_renews(self, index):
        for client in pick([client for client in self.world.clients if is_external(client)], index):
            self.world.handle(Alive(client))

    # Calls.

    @rule(
        client=INDEX,
        num_engines=st.sampled_from([None, 0, 1, 1, 2, 2, 3, 3, 4]),
        remove_ranks=st.one_of(st.just(()), RANKS),
        num_servers=st.sampled_from([None, None, 1, 2, 3]),
        drain_timeout=DRAINS,
        operation_id=IDS,
        timeout=TIMEOUTS,
        has_room=st.sampled_from([True, True, True, False]),
    )
    def scale(self, client, num_engines, remove_ranks, num_servers, drain_timeout, operation_id, timeout, has_room):
        request = Scale(
            num_engines=num_engines,
            remove_ranks=remove_ranks,
            num_api_servers=num_servers,
            drain_timeout=drain_timeout,
        )
        self.world.shortage = None if has_room else "there is no room"
        for caller in pick(self.world.clients, client):
            self.world.send_call(caller, request, operation_id, timeout)

    @rule(
        client=INDEX,
        ranks=RANKS,
        drain_timeout=DRAINS,
        operation_id=IDS,
        timeout=TIMEOUTS,
        options=st.sampled_from([{}, {}, {"max_num_seqs": 7}, {"model": "/new"}]),
        has_room=st.booleans(),
    )
    def restart(self, client, ranks, drain_timeout, operation_id, timeout, options, has_room):
        self.world.shortage = None if has_room else "there is no room"
        ranks = () if options else ranks
        for caller in pick(self.world.clients, client):
            self.world.send_call(
                caller,
                RestartEngines(ranks=ranks, drain_timeout=drain_timeout, options=options),
                operation_id,
                timeout,
            )

    @rule(client=INDEX, request=st.sampled_from(CALLS), operation_id=IDS, timeout=TIMEOUTS)
    def call(self, client, request, operation_id, timeout):
        if isinstance(request, GetScaling):
            operation_id = None
        for caller in pick(self.world.clients, client):
            self.world.send_call(caller, request, operation_id, timeout)

    @rule(index=INDEX, cause=st.sampled_from([None, None, None, "bug"]))
    def member_executes(self, index, cause):
        waiting = [member for member, commands in self.world.commands.items() if commands]
        for member in pick(waiting, index):
            self.world.execute_next(member, cause and CAUSES[cause])

    @rule(index=INDEX)
    def client_has_drained(self, index):
        waiting = [member for member, engines in self.world.draining.items() if engines]
        for client in pick(waiting, index):
            assert isinstance(client, ClientId)
            self.world.handle(Drained(client, self.world.draining[client].pop()))

    # Time and the end.

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 15.0, 40.0, 700.0]))
    def time_passes(self, seconds):
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from([2.0, 40.0]))
    def supervisor_is_suspended(self, seconds):
        self.world.now += seconds
        self.world.handle(TimePassed())

    @rule(kind=st.sampled_from([None] * 10 + ["stop", "kill"]))
    def instance_is_ended(self, kind):
        if kind is not None:
            self.world.is_closed = True
            self.world.handle(StopInstance(10.0) if kind == "stop" else KillInstance())

    def teardown(self):
        if hasattr(self, "world"):
            self.world.settle()
            if not self.world.is_closed and self.world.error is None:
                self.check_scaling()
            self.check_stop()

    def check_scaling(self):
        """Check that the operations had the right outcomes, and that a further one works."""
        world = self.world
        world.check_settled()
        if world.last_scale is not None:
            operation_id, request = world.last_scale
            is_completed = world.state._scaling._past[operation_id].phase == "completed"
            if is_completed and request.num_engines is not None and not world.has_given_up:
                assert len(world.up_ranks()) == request.num_engines
        world.shortage = None
        world.send_call(OBSERVER, ShutdownWeightTransfer(), "shutdown", 600.0)
        world.settle()
        call = world.send_call(OBSERVER, Scale(num_engines=2, num_api_servers=2), "last", 600.0)
        world.settle()
        world.check_settled()
        outcome = world.outcome(call)
        assert isinstance(outcome, dict), outcome
        assert outcome["phase"] == "completed"
        assert len(world.up_ranks()) == outcome["active_data_parallel_size"] == 2
        servers = [member for member in world.running if isinstance(member, ClientId)]
        assert len(servers) == outcome["active_api_server_count"] == 2

    def check_stop(self):
        self.world.is_closed = True
        self.world.handle(StopInstance(5.0))
        self.world.settle()
        assert self.world.has_stopped
        assert not self.world.running


def run(max_examples: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        FleetMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            derandomize=derandomize,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_fleet_random_events_members_agree_and_everything_ends():
    run(60, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fleet_many_random_events_members_agree_and_everything_ends():
    run(5000, derandomize=False)
