from __future__ import annotations

import pytest
from fleet_machine import OBSERVER, Machine, later

from eagleray.config.resolve import engine_index, engines_on_host, first_device, local_ranks
from eagleray.errors import ClusterError, ClusterLost, ConfigError
from eagleray.fleet import timeouts
from eagleray.fleet.events import StartEngines
from eagleray.identity import ClientId, EngineId
from eagleray.messages.control import Command, ControlCall, ControlReturned, InitWeightTransfer, OpenWeightTransfer
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import ExpertsOpened, NodeDraining, OpenExperts, Stop
from eagleray.messages.membership import Left
from eagleray.messages.scaling import Drained, Draining, GetScaling, RestartEngines, Scale
from eagleray.messages.workers import EngineOpened, Topology

E = [EngineId("i", rank) for rank in range(6)]
A = [ClientId("i", index) for index in range(4)]


def ranks(machine: Machine) -> list[int]:
    return sorted(engine.rank for engine in machine.state.engines)


def test_scale_up_engines_join_together_when_all_are_ready():
    it = Machine.serving()
    it.forget()
    call = it.call(Scale(num_engines=3))
    assert set(it.spawned[-2:]) == {E[1], E[2]}
    it.bring_up(E[1])
    assert it.events() == [], "it is unknown to clients before the commit"
    assert it.state.engines == {E[0]}
    assert it.answer(call) is None
    status = it.answer(it.call(GetScaling()))
    assert (status["phase"], status["waiting_for"]) == ("preparing", "engine-2 must start")
    assert status["active_data_parallel_size"] == 1
    it.bring_up(E[2])
    assert it.events() == ["+engine-1", "+engine-2"]
    answer = it.answer(call)
    assert (answer["phase"], answer["participating_ranks"]) == ("completed", [0, 1, 2])
    assert (answer["requested_data_parallel_size"], answer["last_error"]) == (3, None)


def test_scale_down_highest_rank_leaves_at_once_and_is_safe_to_delete_after_its_exit():
    it = Machine.serving(data_parallel_size=3)
    it.forget()
    call = it.call(Scale(num_engines=2))
    (left,) = [message for message in it.received[OBSERVER] if isinstance(message, Left)]
    assert (left.member, left.returns, left.is_planned) == (E[2], False, True)
    assert it.received[E[2]] == [Stop(0.0)]
    assert it.answer(call) is None
    assert it.answer(it.call(GetScaling()))["safe_to_delete_ranks"] == []
    it.exit(E[2], "it ended with exit code 0")
    assert it.answer(call)["safe_to_delete_ranks"] == [2]
    assert ranks(it) == [0, 1]
    it.pass_time(100.0)
    assert it.spawned[3:] == [A[0]]


def test_scale_named_rank_goes_and_its_number_is_used_again_with_the_next_incarnation():
    it = Machine.serving(data_parallel_size=3)
    it.call(Scale(remove_ranks=(0,)))
    it.exit(E[0], "it ended with exit code 0")
    assert ranks(it) == [1, 2]
    call = it.call(Scale(num_engines=3))
    assert it.spawned[-1] == later(E[0])
    it.bring_up(later(E[0]))
    assert it.answer(call)["participating_ranks"] == [0, 1, 2]


def test_scale_to_one_other_engine_replaces_it_without_a_gap():
    it = Machine.serving()
    it.forget()
    it.call(Scale(num_engines=1, remove_ranks=(0,)))
    it.bring_up(E[1])
    assert it.events() == ["+engine-1", "-engine-0 for ever"]


def test_scale_added_engine_is_killed_while_it_starts_is_started_again():
    it = Machine.serving()
    it.forget()
    call = it.call(Scale(num_engines=2))
    it.bring_up(E[1])
    assert it.answer(call)["phase"] == "completed"
    it.call(Scale(num_engines=3), operation_id="more")
    it.bind(E[2])
    it.exit(E[2])
    it.pass_time(1.0)
    it.bring_up(later(E[2]))
    assert it.events() == ["+engine-1", "+engine-2.1"]


def test_scale_added_engine_that_is_ready_is_killed_before_the_others_are():
    it = Machine.serving()
    it.forget()
    call = it.call(Scale(num_engines=3))
    it.bring_up(E[1])
    it.exit(E[1])
    it.bring_up(E[2])
    assert it.answer(call) is None
    it.pass_time(1.0)
    it.bring_up(later(E[1]))
    assert it.events() == ["+engine-1.1", "+engine-2"]
    assert it.answer(call)["phase"] == "completed"


def test_scale_added_engine_that_cannot_start_rolls_back_and_the_next_operation_works():
    it = Machine.serving()
    it.forget()
    call = it.call(Scale(num_engines=3))
    it.bring_up(E[1])
    for attempt in range(2):
        failing = later(E[2], attempt)
        it.handle(Ended(failing, Failure.of(ConfigError("the cache is too small"))))
        it.exit(failing, "it ended with exit code 1")
        it.pass_time(1.0)
    assert it.events() == [], "clients never knew of it"
    assert it.error is None
    it.exit_all()
    failure = it.answer(call)
    assert "the cache is too small" in failure.message
    status = it.answer(it.call(GetScaling()))
    assert (status["phase"], status["participating_ranks"]) == ("failed", [0])
    assert "the cache is too small" in status["last_error"]
    assert set(it.running) == {E[0], A[0]}
    again = it.call(Scale(num_engines=2))
    it.bring_up(later(E[1]))
    assert it.answer(again)["phase"] == "completed"


def test_scale_added_engine_that_hangs_is_rolled_back_at_the_deadline():
    it = Machine.serving(startup_timeout=10.0)
    call = it.call(Scale(num_engines=2), timeout=10_000.0)
    it.pass_time(10.0 + timeouts.START_MARGIN_SECONDS)
    assert it.running[E[1]] == ["kill"]
    it.exit(E[1])
    it.pass_time(10.0 + timeouts.START_MARGIN_SECONDS)
    it.exit_all()
    it.pass_time(1.0)
    assert "did not start within" in it.answer(call).message
    assert set(it.running) == {E[0], A[0]}


def test_scale_caller_is_answered_at_its_deadline_and_the_operation_goes_on():
    it = Machine.serving()
    call = it.call(Scale(num_engines=2), operation_id="mine", timeout=5.0)
    it.pass_time(5.0)
    assert it.answer(call).kind == "DeadlineExceeded"
    again = it.call(Scale(num_engines=2), operation_id="mine")
    assert it.spawned.count(E[1]) == 1
    it.bring_up(E[1])
    assert it.answer(again)["phase"] == "completed"
    assert it.answer(it.call(Scale(num_engines=2), operation_id="mine"))["phase"] == "completed"
    other = it.answer(it.call(Scale(num_engines=4), operation_id="mine"))
    assert other.kind == "WrongState"
    assert "asked for something else" in other.message


def test_scale_newer_request_replaces_one_that_prepares():
    it = Machine.serving()
    first = it.call(Scale(num_engines=4))
    second = it.call(Scale(num_engines=2))
    assert it.answer(first) is None
    it.exit_all()
    assert "replaced by operation op-2" in it.answer(first).message
    assert it.spawned[-1] == later(E[1])
    it.bring_up(later(E[1]))
    assert it.answer(second)["participating_ranks"] == [0, 1]


def test_scale_newer_request_waits_for_one_that_commits_and_replaces_one_that_waits():
    it = Machine.serving(data_parallel_size=3)
    first = it.call(Scale(num_engines=2))
    second, third = it.call(Scale(num_engines=5)), it.call(Scale(num_engines=1))
    assert "replaced" in it.answer(second).message
    it.exit(E[2])
    assert it.answer(first)["phase"] == "completed"
    it.exit(E[1])
    assert it.answer(third)["participating_ranks"] == [0]


@pytest.mark.parametrize("ends", ["drained", "deadline", "client leaves"])
def test_scale_with_drain_clients_finish_first(ends):
    it = Machine.serving(data_parallel_size=2)
    it.forget()
    call = it.call(Scale(num_engines=1, drain_timeout=30.0))
    assert it.received[OBSERVER][-1] == Draining(E[1])
    assert it.answer(it.call(GetScaling()))["phase"] == "draining"
    it.handle(Drained(OBSERVER, E[1]))
    assert it.events() == []
    match ends:
        case "drained":
            it.handle(Drained(A[0], E[1]))
        case "deadline":
            it.pass_time(30.0)
        case "client leaves":
            it.exit(A[0])
    assert "-engine-1 for ever" in it.events()
    it.exit(E[1])
    assert it.answer(call)["phase"] == "completed"


def test_scale_draining_engine_is_named_to_clients_that_attach_meanwhile():
    it = Machine.serving(data_parallel_size=2)
    it.call(Scale(num_engines=1, drain_timeout=30.0))
    it.exit(A[0])
    it.pass_time(0.0)
    it.bind(later(A[0]))
    assert it.received[later(A[0])] == [Draining(E[1])]


def test_scale_draining_engine_that_is_killed_does_not_come_back():
    it = Machine.serving(data_parallel_size=2)
    call = it.call(Scale(num_engines=1, drain_timeout=30.0))
    it.exit(E[1])
    it.exit_all()
    assert it.answer(call)["participating_ranks"] == [0]
    it.pass_time(60.0)
    assert set(it.running) == {E[0], A[0]}


def test_scale_engine_that_was_given_up_is_brought_back():
    it = Machine.serving(data_parallel_size=2, max_engine_restarts=0)
    it.exit(E[1])
    assert ranks(it) == [0]
    call = it.call(Scale(num_engines=2))
    assert it.spawned[-1] == later(E[1])
    it.bring_up(later(E[1]))
    assert it.answer(call)["participating_ranks"] == [0, 1]


def test_scale_to_the_present_number_completes_at_once():
    it = Machine.serving(data_parallel_size=2)
    assert it.answer(it.call(Scale(num_engines=2)))["phase"] == "completed"


def test_scale_leaving_engine_that_hangs_is_killed():
    it = Machine.serving(data_parallel_size=2)
    it.call(Scale(num_engines=1))
    it.pass_time(3 * timeouts.STOP_TIMEOUT_SECONDS)
    assert it.running[E[1]][:2] == ["kill", "kill"]


def test_scale_api_servers_are_added_and_finish_before_they_go():
    it = Machine.serving()
    call = it.call(Scale(num_api_servers=3))
    for server in A[1:3]:
        it.bring_up(server)
    assert it.answer(call)["active_api_server_count"] == 3
    call = it.call(Scale(num_api_servers=1, drain_timeout=20.0))
    assert it.received[A[2]][-1] == Stop(30.0, others_stay=True), "the time of the option `shutdown_timeout`"
    assert A[2] in it.attached, "its streams still need the engines"
    for server in A[1:3]:
        it.exit(server, "it ended with exit code 0")
    assert it.answer(call)["active_api_server_count"] == 1
    assert it.received[A[0]][-1] == Left(A[2], "it ended with exit code 0", False, time=1000.0, is_planned=True)
    it.pass_time(100.0)
    assert set(it.running) == {E[0], A[0]}


def test_scale_caller_at_an_api_server_that_goes_is_answered_before():
    it = Machine.serving(api_server_count=2)
    call = it.call(Scale(num_api_servers=1), client=A[1])
    answer = it.answer(call)
    assert (answer["phase"], answer["kind"]) == ("committing", "scale")
    assert isinstance(it.received[A[1]][-1], Stop), "the answer comes before the order to stop"
    it.exit(A[1], "it ended with exit code 0")
    assert it.answer(it.call(GetScaling()))["phase"] == "completed"


def test_restart_without_room_engines_one_after_another():
    it = Machine.serving(data_parallel_size=2)
    it.shortage = "no memory is free"
    it.forget()
    call = it.call(RestartEngines())
    (left,) = [message for message in it.received[OBSERVER] if isinstance(message, Left)]
    assert (left.member, left.returns, left.is_planned) == (E[0], True, True)
    it.exit(E[0], "it ended with exit code 0")
    it.pass_time(0.0)
    it.bring_up(later(E[0]))
    assert it.received[E[1]][-1] == Stop(0.0)
    it.exit(E[1], "it ended with exit code 0")
    it.pass_time(0.0)
    assert it.answer(call) is None
    it.bring_up(later(E[1]))
    assert it.answer(call)["phase"] == "completed"
    assert it.events() == ["-engine-0", "+engine-0.1", "-engine-1", "+engine-1.1"]


def test_restart_stops_when_a_replacement_is_given_up():
    it = Machine.serving(data_parallel_size=2)
    it.shortage = "no memory is free"
    call = it.call(RestartEngines(ranks=(1,)))
    it.exit(E[1], "it ended with exit code 0")
    for attempt in (1, 2):
        it.pass_time(1.0)
        it.handle(Ended(later(E[1], attempt), Failure.of(ConfigError("the model is gone"))))
        it.exit(later(E[1], attempt), "it ended with exit code 1")
    assert "given up" in it.answer(call).message
    assert it.is_up(E[0])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Scale(num_engines=0), "0 engines were asked for: at least one must stay"),
        (Scale(remove_ranks=(7,)), r"there is no engine 7: the ranks are \[0, 1\]"),
        (Scale(remove_ranks=(0, 1)), "at least one must stay"),
        (Scale(num_api_servers=0), "0 API servers were asked for"),
        (RestartEngines(ranks=(3,)), "there is no engine 3"),
    ],
)
def test_scale_impossible_request_is_refused_and_changes_nothing(request_, message):
    it = Machine.serving(data_parallel_size=2)
    failure = it.answer(it.call(request_))
    assert failure.kind == "InvalidRequest"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failure.message)
    assert len(it.spawned) == 3


def test_scale_engines_are_configured_for_the_ranks_of_now():
    def sizes(it, rank):
        config = it.state.engine_config(E[rank])
        assert len(local_ranks(config)) == config.parallel.data_parallel_size
        return engines_on_host(config), engine_index(config, rank), first_device(config, rank)

    it = Machine.serving(data_parallel_size=2, data_parallel_size_local=2, tensor_parallel_size=2)
    assert sizes(it, 1) == (2, 1, 2)
    call = it.call(Scale(num_engines=4))
    assert sizes(it, 3) == (4, 3, 6)
    for engine in E[2:4]:
        it.bring_up(engine)
    it.answer(call)
    it.call(Scale(remove_ranks=(1, 3)))
    assert sizes(it, 2) == (3, 2, 4)  # the cores of rank 1 are free for it to come back


def test_scale_without_room_is_refused_with_the_shortage():
    it = Machine.serving()
    it.shortage = "2 engines more need 8.0 GiB, and 3.0 GiB are free"
    failure = it.answer(it.call(Scale(num_engines=3)))
    assert failure.message == it.shortage
    assert it.spawned == [E[0], A[0]]


def test_scale_before_serving_is_refused():
    it = Machine()
    it.handle(StartEngines((0,)))
    it.adopt()
    assert it.answer(it.call(Scale(num_engines=3))).kind == "Unavailable"


def test_scale_instance_fails_meanwhile_callers_are_answered():
    it = Machine.serving(max_engine_restarts=0)
    call = it.call(Scale(num_engines=2))
    it.exit(E[0])
    assert it.error is not None
    assert it.answer(call).kind == "Unavailable"


def test_scale_caller_leaves_it_gets_no_answer_and_no_timer_is_left():
    it = Machine.serving()
    it.handle(ControlCall(client=A[0], call_id=1, operation_id="a", request=Scale(num_engines=2), timeout=600.0))
    assert it.state.deadline is not None
    it.exit(A[0])
    it.pass_time(0.0)
    it.bring_up(later(A[0]))
    it.bring_up(E[1])
    assert ranks(it) == [0, 1]
    assert not [message for message in it.received[A[0]] if isinstance(message, ControlReturned)]
    assert it.state.deadline is None


def test_scale_newer_request_waits_for_a_rollback():
    it = Machine.serving()
    first = it.call(Scale(num_engines=3))
    it.call(Scale(num_engines=2), operation_id="second")
    third = it.call(Scale(num_engines=2), operation_id="third")
    assert it.answer(it.call(GetScaling()))["waiting_for"] == "engine-1, engine-2 must exit"
    it.exit_all()
    assert "replaced by operation second" in it.answer(first).message
    it.bring_up(later(E[1]))
    assert it.answer(third)["participating_ranks"] == [0, 1]


def test_scale_engine_that_was_given_up_still_runs_another_rank_is_started():
    it = Machine.serving(data_parallel_size=2, max_engine_restarts=0)
    it.handle(Ended(E[1], Failure.of(ValueError("there is a bug"))))
    call = it.call(Scale(num_engines=2))
    it.bring_up(E[2])
    assert it.answer(call)["participating_ranks"] == [0, 2]


def test_scale_api_server_that_was_given_up_is_started_again():
    it = Machine.serving(api_server_count=2)
    it.exit(A[1])
    for attempt in (1, 2):
        it.pass_time(1.0)
        it.handle(Ended(later(A[1], attempt), Failure.of(OSError("the disk is full"))))
        it.exit(later(A[1], attempt), "it ended with exit code 1")
    assert it.answer(it.call(GetScaling()))["active_api_server_count"] == 1
    call = it.call(Scale(num_api_servers=2))
    it.bring_up(later(A[1], 3))
    assert it.answer(call)["active_api_server_count"] == 2


def test_scale_draining_engine_that_is_given_up_leaves_once():
    it = Machine.serving(data_parallel_size=2, max_engine_restarts=0)
    it.forget()
    call = it.call(Scale(num_engines=1, drain_timeout=30.0))
    it.exit(E[1])
    assert it.answer(call)["phase"] == "completed"
    assert it.events() == ["-engine-1 for ever"]


def test_scale_late_report_of_an_earlier_drain_is_ignored():
    it = Machine.serving()
    it.shortage = "no memory is free"
    it.call(RestartEngines(drain_timeout=30.0))
    for client in (OBSERVER, A[0]):
        it.handle(Drained(client, E[0]))
    it.exit(E[0], "it ended with exit code 0")
    it.pass_time(0.0)
    it.bring_up(later(E[0]))
    it.forget()
    it.call(RestartEngines(drain_timeout=30.0))
    for client in (OBSERVER, A[0]):
        it.handle(Drained(client, E[0]))
    assert it.events() == []
    for client in (OBSERVER, A[0]):
        it.handle(Drained(client, later(E[0])))
    assert it.events() == ["-engine-0.1"]


def test_restart_engine_that_starts_already_is_awaited():
    it = Machine.serving()
    it.shortage = "no memory is free"
    it.exit(E[0])
    it.pass_time(0.0)
    call = it.call(RestartEngines(drain_timeout=30.0))
    it.bring_up(later(E[0]))
    assert it.answer(call)["phase"] == "completed"
    assert it.running.keys() == {later(E[0]), A[0]}


def test_scale_while_a_transfer_to_any_number_of_engines_is_open_prepares_it_on_added_ones():
    it = Machine.serving()
    call = it.call(InitWeightTransfer(init_info={}))
    it.execute(E[0], is_collective=False)
    assert it.answer(call)
    scaled = it.call(Scale(num_engines=2))
    it.bring_up(E[1])
    (command,) = [message for message in it.received[E[1]] if isinstance(message, Command)]
    assert command.body == OpenWeightTransfer(init_info={}, first_rank=1)
    assert it.answer(scaled)["phase"] == "completed"


def test_scale_while_engines_are_added_a_transfer_waits_for_them():
    it = Machine.serving()
    it.call(Scale(num_engines=2))
    call = it.call(InitWeightTransfer(init_info={}))
    it.bring_up(E[1])
    assert it.execute(E[0]).body.first_rank == 0
    assert it.execute(E[1]).body.first_rank == 1
    assert it.answer(call)
    assert "trainer is connected" in it.answer(it.call(Scale(num_engines=3))).message
    it.exit(E[1])
    assert it.answer(it.call(Scale(num_engines=1)))["phase"] == "completed", "the transfer is broken"


@pytest.mark.parametrize("kind", [ClusterError, ClusterLost])
def test_scale_cluster_without_room_ends_the_operation_at_once_and_removes_the_others(kind):
    """Also if the cluster once had room: an engine that has served would wait until it has again."""
    it = Machine.serving()
    it.forget()
    call = it.call(Scale(num_engines=3))
    assert it.state.num_engines == 3
    it.bring_up(E[1])
    it.exit_with(E[2], kind("the cluster cannot hold 3 engines of {GPU: 1}: node 10.0.0.1 has GPU 0 free of 2"))
    it.exit_all()
    assert it.answer(call).message.startswith("the cluster cannot hold 3 engines")
    assert it.events() == []
    assert it.spawned[2:] == [E[1], E[2]], "another start would find the same"
    it.pass_time(100.0)
    assert set(it.running) == {E[0], A[0]}
    again = it.call(Scale(num_engines=2))
    it.bring_up(later(E[1]))
    assert it.answer(again)["phase"] == "completed"


def drains(it: Machine, *engines: EngineId) -> None:
    """Give the notices that are repeated while the engines are on nodes that drain."""
    for engine in engines:
        it.handle(NodeDraining(engine, "10.0.0.2 (bbbbbbbb)", 90.0))


def planned(it: Machine) -> list[tuple[EngineId, bool]]:
    return [(m.member, m.returns) for m in it.received[OBSERVER] if isinstance(m, Left) and m.is_planned]


def test_node_drains_engines_leave_one_after_another():
    it = Machine.serving(data_parallel_size=3)
    it.forget()
    drains(it, E[1], E[2])
    assert planned(it) == [(E[1], True)]
    assert it.received[E[1]] == [Stop(0.0)]
    drains(it, E[1], E[2])
    it.exit(E[1], "it ended with exit code 0")
    drains(it, E[2])
    it.pass_time(0.0)
    it.bind(later(E[1]))
    drains(it, E[2])
    assert E[2] in it.attached, "the replacement of the first one has not joined"
    it.start(later(E[1]))
    drains(it, E[1], E[2])
    assert planned(it) == [(E[1], True), (E[2], True)]


def test_node_drains_single_engine_leaves():
    it = Machine.serving()
    drains(it, E[0])
    assert planned(it) == [(E[0], True)]
    it.exit(E[0], "it ended with exit code 0")
    it.pass_time(0.0)
    it.bring_up(later(E[0]))
    assert it.error is None


def test_node_drains_last_engine_that_serves_stays_until_another_one_serves():
    it = Machine.serving(data_parallel_size=2)
    it.exit(E[0])
    it.pass_time(0.0)
    drains(it, E[1])
    assert planned(it) == []
    it.bring_up(later(E[0]))
    drains(it, E[1])
    assert planned(it) == [(E[1], True)]


def test_node_drains_engine_that_moved_and_is_given_up_does_not_block_the_others():
    it = Machine.serving(data_parallel_size=3)
    drains(it, E[1])
    it.exit(E[1], "it ended with exit code 0")
    for attempt in (1, 2):
        it.pass_time(1.0)
        it.exit_with(later(E[1], attempt), ConfigError("the model is gone"))
    drains(it, E[2])
    assert planned(it) == [(E[1], True), (E[2], True)]


def test_node_drains_while_the_engine_drains_for_scaling_or_is_added():
    it = Machine.serving(data_parallel_size=2)
    it.call(Scale(num_engines=1, drain_timeout=30.0))
    drains(it, E[1])
    assert planned(it) == []
    it.pass_time(30.0)
    assert planned(it) == [(E[1], False)]
    it.exit(E[1], "it ended with exit code 0")
    it.call(Scale(num_engines=3))
    it.bring_up(later(E[1]))
    drains(it, later(E[1]))
    it.bring_up(E[2])
    assert later(E[1]) in it.running
    assert ranks(it) == [0, 1, 2]
    drains(it, later(E[1]))
    assert planned(it)[1:] == [(later(E[1]), True)]


def test_node_drains_engines_that_share_experts_form_their_group_again():
    it = Machine(data_parallel_size=2, enable_expert_parallel=True)
    it.adopt()
    it.handle(StartEngines((0, 1)))
    opened = EngineOpened(
        rank=0,
        topology=Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=["here"], addresses=[""]),
        opened=[],
    )
    for engine in E[:2]:
        it.bind(engine)
        it.handle(ExpertsOpened(engine, 1, opened))
    for engine in E[:2]:
        it.start(engine)
    assert it.is_serving
    it.forget()
    drains(it, E[1])
    assert it.received[E[0]][-1] == OpenExperts(2, [0, 1], [0, 1])
