"""Restarts of engines one after another: with an engine more meanwhile, with other options, and when these fail."""

from __future__ import annotations

import pytest
from fleet_machine import INFO, OBSERVER, Machine, later

from eagleray.errors import ClusterError, ConfigError, InvalidRequest
from eagleray.fleet import timeouts
from eagleray.identity import ClientId, EngineId
from eagleray.messages.control import Command, GetWeightInfo, SetState, StartWeightUpdate
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import EngineStarted, Stop
from eagleray.messages.membership import Left
from eagleray.messages.scaling import Drained, Draining, GetScaling, RestartEngines, Scale

E = [EngineId("i", rank) for rank in range(6)]
A = [ClientId("i", index) for index in range(4)]
GONE = "it ended with exit code 0"
SEQS = {"max_num_seqs": 7}
CHECKPOINT = {"model": "/new"}


def seqs(it: Machine, engine: EngineId) -> int:
    return it.state.engine_config(engine).scheduling.max_num_seqs


def start(it: Machine, engine: EngineId) -> None:
    """Start an engine with the weights of its checkpoint, and have it execute its commands."""
    it.bind(engine)
    it.handle(EngineStarted(engine, INFO, it.state.engine_options(engine).update))
    while any(isinstance(message, Command) and message.number not in it._executed for message in it.received[engine]):
        it.execute(engine, update=it.state.engine_options(engine).update)
    it.confirm()


def replace(it: Machine, engine: EngineId) -> EngineId:
    """Have an engine exit that was told to, and its replacement start. Returns the latter."""
    assert it.received[engine][-1] == Stop(0.0)
    it.exit(engine, GONE)
    it.pass_time(0.0)
    start(it, later(engine))
    return later(engine)


def cannot_start(it: Machine, engine: EngineId) -> None:
    it.handle(Ended(engine, Failure.of(ConfigError("the cache is too small"))))
    it.exit(engine, "it ended with exit code 1")
    it.pass_time(0.0)


def status(it: Machine) -> dict[str, object]:
    return it.answer(it.call(GetScaling()))


def test_restart_single_engine_leaves_no_gap():
    it = Machine.serving()
    it.forget()
    call = it.call(RestartEngines())
    assert (it.spawned[-1], it.events()) == (E[1], [])
    assert status(it)["waiting_for"] == "engine-1 must start"
    start(it, E[1])
    assert it.events() == ["+engine-1", "-engine-0"]
    replace(it, E[0])
    it.exit(E[1], GONE)
    assert it.events() == ["+engine-1", "-engine-0", "+engine-0.1", "-engine-1 for ever"]
    assert all(left.is_planned for left in it.received[OBSERVER] if isinstance(left, Left))
    answer = it.answer(call)
    assert (answer["phase"], answer["participating_ranks"]) == ("completed", [0])


def test_restart_surge_engine_takes_no_rank_of_another_and_no_part_of_the_cores():
    it = Machine.serving(data_parallel_size=3)
    it.call(Scale(remove_ranks=(1,)))
    it.exit(E[1], GONE)
    it.call(RestartEngines(ranks=(2,)))
    assert it.spawned[-1] == later(E[1])
    assert it.state.engine_config(E[1]).parallel.data_parallel_size == 3
    it = Machine.serving()
    it.call(RestartEngines())
    assert it.state.engine_config(E[1]).parallel.data_parallel_size == 2
    assert it.state.engine_config(E[1]).ray == it.config.ray, "another option of Ray would choose Ray as the executor"
    start(it, E[1])
    assert it.state.engine_config(E[0]).parallel.data_parallel_size == 1


def test_restart_surge_engine_on_ray_does_not_wait_long_for_room():
    it = Machine.serving(data_parallel_backend="ray")
    it.call(RestartEngines())
    assert it.state.engine_config(E[1]).ray.ray_placement_timeout == timeouts.SURGE_PLACEMENT_SECONDS
    assert it.state.engine_config(E[0]).ray == it.config.ray


def test_restart_with_drain_requests_of_each_engine_finish():
    it = Machine.serving()
    call = it.call(RestartEngines(drain_timeout=30.0))
    start(it, E[1])
    assert it.received[OBSERVER][-1] == Draining(E[0])
    for client in (OBSERVER, A[0]):
        it.handle(Drained(client, E[0]))
    replace(it, E[0])
    assert it.received[OBSERVER][-1] == Draining(E[1])
    it.pass_time(30.0)
    it.exit(E[1], GONE)
    assert it.answer(call)["phase"] == "completed"


def test_restart_with_options_goes_on_without_a_surge_engine_that_has_no_room():
    it = Machine.serving(data_parallel_size=2, max_engine_restarts=0)
    call = it.call(RestartEngines(options=SEQS), timeout=10_000.0)
    it.exit_with(E[2], ClusterError("there is no room"))
    it.exit_all()
    it.pass_time(0.0)
    start(it, later(E[0]))
    replace(it, E[1])
    answer = it.answer(call)
    assert (answer["phase"], answer["participating_ranks"]) == ("completed", [0, 1])
    assert answer["engine_options"] == SEQS


@pytest.mark.parametrize("error", [ClusterError("there is no room"), ConfigError("there is one GPU"), None])
def test_restart_surge_engine_cannot_start_the_others_are_restarted_without_it(error):
    it = Machine.serving(data_parallel_size=2, startup_timeout=10.0)
    it.forget()
    call = it.call(RestartEngines(), timeout=10_000.0)
    for attempt in range(2):
        surge = later(E[2], attempt)
        if surge not in it.running:
            break
        if error is None:
            it.pass_time(10.0 + timeouts.START_MARGIN_SECONDS)
            it.exit_all()
        else:
            it.exit_with(surge, error)
        it.pass_time(1.0)
    it.exit_all()
    it.pass_time(0.0)
    start(it, later(E[0]))
    replace(it, E[1])
    assert it.answer(call)["participating_ranks"] == [0, 1]
    assert it.events() == ["-engine-0", "+engine-0.1", "-engine-1", "+engine-1.1"]


def test_restart_newer_operation_replaces_one_whose_surge_engine_starts():
    it = Machine.serving()
    first = it.call(RestartEngines(options=SEQS))
    second = it.call(Scale(num_engines=2))
    it.exit_all()
    assert "replaced" in it.answer(first).message
    start(it, later(E[1]))
    assert it.answer(second)["participating_ranks"] == [0, 1]
    assert seqs(it, later(E[1])) == 256


def test_restart_surge_engine_is_killed_while_the_others_are_restarted():
    it = Machine.serving()
    call = it.call(RestartEngines(options=SEQS))
    start(it, E[1])
    it.exit(E[1])
    replace(it, E[0])
    it.pass_time(0.0)
    it.exit_all()
    assert it.answer(call)["phase"] == "completed"
    assert seqs(it, E[0]) == 7


@pytest.mark.parametrize("has_room", [True, False])
def test_restart_with_options_every_engine_gets_them_and_so_do_later_ones(has_room):
    it = Machine.serving(data_parallel_size=2)
    it.shortage = None if has_room else "no memory is free"
    call = it.call(RestartEngines(options=SEQS))
    if has_room:
        assert (seqs(it, E[2]), seqs(it, E[0])) == (7, 256)
        start(it, E[2])
    assert status(it)["engine_options"] == {}
    replace(it, E[0])
    assert (seqs(it, E[0]), seqs(it, E[1])) == (7, 256)
    replace(it, E[1])
    it.exit_all()
    answer = it.answer(call)
    assert (answer["phase"], answer["requested_options"], answer["engine_options"]) == ("completed", SEQS, SEQS)
    it.exit(later(E[1]))
    it.pass_time(0.0)
    assert seqs(it, E[1]) == 7
    start(it, later(E[1], 2))
    it.call(Scale(num_engines=3))
    assert seqs(it, E[2]) == 7
    start(it, it.spawned[-1])
    again = it.call(RestartEngines(options={"enable_prefix_caching": False, "max_num_seqs": None}))
    it.shortage = "no memory is free"
    assert it.answer(again) is None
    assert status(it)["engine_options"] == SEQS


def test_restart_with_options_that_no_engine_can_start_with_changes_nothing():
    it = Machine.serving()
    it.forget()
    call = it.call(RestartEngines(options=SEQS))
    cannot_start(it, E[1])
    it.exit_all()
    assert it.answer(call).message == "the cache is too small"
    assert it.events() == []
    now = status(it)
    assert (now["phase"], now["engine_options"], now["participating_ranks"]) == ("failed", {}, [0])
    assert set(it.running) == {E[0], A[0]}
    assert it.spawned == [E[0], A[0], E[1]], "the mistake is tried once"
    it.exit(E[0])
    it.pass_time(0.0)
    assert seqs(it, E[0]) == 256


def test_restart_with_options_without_room_the_first_engine_gets_the_former_ones_back():
    it = Machine.serving()
    it.shortage = "no memory is free"
    it.forget()
    call = it.call(RestartEngines(options=SEQS))
    it.exit(E[0], GONE)
    it.pass_time(0.0)
    cannot_start(it, later(E[0]))
    assert it.error is None
    assert seqs(it, E[0]) == 256
    assert it.answer(call) is None
    start(it, later(E[0], 2))
    assert it.answer(call).message == "the cache is too small"
    assert it.events() == ["-engine-0", "-engine-0.1", "+engine-0.2"]


@pytest.mark.parametrize("has_room", [True, False])
def test_restart_with_options_later_engine_cannot_start_with_them_all_get_the_former_ones_back(has_room):
    it = Machine.serving(data_parallel_size=2)
    it.shortage = None if has_room else "no memory is free"
    call = it.call(RestartEngines(options=SEQS))
    if has_room:
        start(it, E[2])
    first = replace(it, E[0])
    it.exit(E[1], GONE)
    it.pass_time(0.0)
    second = later(E[1])
    for _ in range(2):  # another one could start with them, so it is tried again
        cannot_start(it, second)
        second = later(second)
    assert (seqs(it, E[0]), seqs(it, E[1])) == (7, 256)
    replace(it, first)
    assert it.answer(call) is None
    start(it, second)
    it.exit_all()
    assert it.answer(call).message == "the cache is too small"
    assert status(it)["participating_ranks"] == [0, 1]
    assert (seqs(it, E[0]), seqs(it, E[1])) == (256, 256)


def test_restart_with_options_engine_that_hangs_is_rolled_back_at_the_deadline():
    it = Machine.serving(startup_timeout=10.0)
    it.shortage = "no memory is free"
    call = it.call(RestartEngines(options=SEQS), timeout=10_000.0)
    for _ in range(2):
        it.exit_all()
        it.pass_time(10.0 + timeouts.START_MARGIN_SECONDS)
    it.exit_all()
    it.pass_time(1.0)
    assert seqs(it, E[0]) == 256
    start(it, it.replica(E[0]).member)
    assert "did not start within" in it.answer(call).message


def test_restart_with_options_killed_engines_start_with_the_former_ones_until_one_has_started():
    it = Machine.serving(data_parallel_size=2)
    call = it.call(RestartEngines(options=SEQS))
    it.exit(E[1])
    it.exit(E[2])
    it.pass_time(1.0)
    assert [seqs(it, engine) for engine in E[:3]] == [256, 256, 7]
    start(it, later(E[2]))
    assert it.is_up(E[0]) is False, "it is restarted"
    it.exit(later(E[1]))
    it.pass_time(1.0)
    assert seqs(it, E[1]) == 7
    replace(it, E[0])
    start(it, later(E[1], 2))
    it.exit_all()
    assert it.answer(call)["phase"] == "completed"
    assert it.spawned.count(later(E[1], 3)) == 0, "it had the new options already"


@pytest.mark.parametrize("has_room", [True, False])
def test_restart_with_a_checkpoint_it_counts_as_a_weight_update(has_room):
    it = Machine.serving(data_parallel_size=2)
    it.shortage = None if has_room else "no memory is free"
    call = it.call(RestartEngines(options=CHECKPOINT))
    it.fetch()
    config = it.state.engine_config(E[2] if has_room else E[0]).model if has_room else None
    if has_room:
        assert (config.model, config.served_model_name, config.max_model_len) == ("/new", ["eagleray-demo"], 64)
        assert config.tokenizer.endswith("demo_model")
        start(it, E[2])
    first = replace(it, E[0])
    info = it.answer(it.call(GetWeightInfo()))
    assert (info["weight_version"], info["update"]) == ("1", 1)
    failure = it.answer(it.call(StartWeightUpdate()))
    assert "a restart changes the checkpoint" in failure.message
    second = replace(it, E[1])
    it.exit_all()
    assert it.answer(call)["phase"] == "completed"
    states = [message.body.state.update for message in it.received[first] if isinstance(message, Command)]
    assert states == ([] if has_room else [1])
    it.exit(second)
    it.pass_time(0.0)
    start(it, later(second))
    assert it.is_up(later(second))
    assert not [m for m in it.received[later(second)] if isinstance(m, Command) and not isinstance(m.body, SetState)]


def test_restart_with_a_checkpoint_that_fails_late_restores_the_number_of_the_weights():
    it = Machine.serving(data_parallel_size=3)
    it.shortage = "no memory is free"
    call = it.call(RestartEngines(options=CHECKPOINT))
    it.fetch()
    first, second = replace(it, E[0]), replace(it, E[1])
    it.exit(E[2], GONE)
    it.pass_time(0.0)
    cannot_start(it, later(E[2]))
    cannot_start(it, later(E[2], 2))
    first = replace(it, first)
    failure = it.answer(it.call(StartWeightUpdate()))
    assert "is undone" in failure.message, f"{second.label} still has the weights with the next number"
    second = replace(it, second)
    third = later(E[2], 3)
    start(it, third)
    assert it.answer(call).message == "the cache is too small"
    assert it.state.engine_config(E[0]).model.model is None
    assert it.is_up(third)
    assert it.answer(it.call(GetWeightInfo()))["weight_version"] == "default"
    update = it.call(StartWeightUpdate())
    for engine in (first, second, third):
        it.execute(engine)
    assert it.answer(update)["update"] == 2, "no number is used twice"


def test_restart_with_a_checkpoint_has_a_status_while_it_is_fetched():
    it = Machine.serving(data_parallel_size=2, api_server_count=2)
    call = it.call(RestartEngines(options=CHECKPOINT), operation_id="upgrade", timeout=5.0, client=A[1])
    now = status(it)
    assert (now["operation_id"], now["phase"], now["requested_options"]) == ("upgrade", "fetching", CHECKPOINT)
    assert now["waiting_for"] == "client-1 must find or download /new and check it"
    it.pass_time(5.0)
    assert "operation upgrade goes on: client-1 must find" in it.answer(call).message
    again = it.call(RestartEngines(options=CHECKPOINT), operation_id="upgrade")
    it.exit(A[1])
    assert status(it)["waiting_for"] == "client-900 must find or download /new and check it"
    scale = it.call(Scale(num_engines=3))
    start(it, E[2])
    assert it.answer(scale)["phase"] == "completed", "other operations do not wait for a download"
    assert it.fetch() == OBSERVER
    now = status(it)
    assert (now["phase"], now["requested_options"]) == ("preparing", {**CHECKPOINT, "revision": "pinned"})
    assert it.state.engine_config(E[3]).model.revision == "pinned"
    assert it.answer(again) is None


def test_restart_with_a_checkpoint_that_cannot_be_fetched_fails():
    it = Machine.serving()
    wrong = InvalidRequest("there is no such directory", param="model")
    call = it.call(RestartEngines(options=CHECKPOINT))
    it.fetch(wrong)
    assert (it.answer(call).message, it.answer(call).param) == (str(wrong), "model")
    assert (status(it)["phase"], status(it)["is_retryable"]) == ("failed", False)
    first, second = (it.call(RestartEngines(options=CHECKPOINT)) for _ in range(2))
    assert "was replaced by" in it.answer(first).message
    it.pass_time(timeouts.FETCH_CHECKPOINT_SECONDS)
    assert it.answer(second) is not None
    assert "the checkpoint was not there in time: client-900 must find" in status(it)["last_error"]
    assert it.spawned == [E[0], A[0]]


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (RestartEngines(options={"tensor_parallel_size": 2}), "tensor_parallel_size", "cannot be changed by a restart"),
        (RestartEngines(options={"max_num_seq": 2}), "max_num_seq", "did you mean `max_num_seqs`"),
        (RestartEngines(options={"max_num_seqs": 0}), "max_num_seqs", "expected `int` >= 1"),
        (RestartEngines(options=SEQS, ranks=(0,)), "ranks", "leave out `ranks`"),
    ],
)
def test_restart_with_options_that_are_refused_changes_nothing(request_, param, message):
    it = Machine.serving()
    failure = it.answer(it.call(request_))
    assert failure.param == param
    assert message in failure.message
    assert it.spawned == [E[0], A[0]]


def test_restart_engines_that_share_experts_keep_their_checkpoint():
    it = Machine(data_parallel_size=2, enable_expert_parallel=True)
    it.state._first_start.is_serving = True
    it.adopt()
    assert "need the same weights" in it.answer(it.call(RestartEngines(options=CHECKPOINT))).message
