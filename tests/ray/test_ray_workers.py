"""Engines whose workers are Ray actors: start, failure, exit and clean-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import ray
import ray_cluster
from engine_program import Caller
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_cluster import ACC, FAR, AddNode, MakeGroup, config, new_engine
from ray_workers import Facts

from eagleray.cluster import placement_groups
from eagleray.config.sections import Config, RayConfig
from eagleray.errors import ClusterError, ConfigError, DeadlineExceeded, WorkerFailed, WorkerLost
from eagleray.executor.executor import Executor
from eagleray.executor.queue_group import QueueGroup
from eagleray.executor.ray_actors import start_ray_actors
from eagleray.identity import EngineId
from eagleray.messages.steps import OpenGroup
from eagleray.messages.workers import GroupOpened, RayContext

HERE = str(Path(__file__).parent)
CANARY = "canary-4711-of-this-test"
NOTICE_SECONDS = 1.0
"""Longest time until the death of a process is reported."""


class Start:
    """Starts the workers of engines; stack them with the test."""

    def __init__(self, stack: ExitStack, runtime_dir: Path) -> None:
        self._stack = stack
        self._runtime_dir = runtime_dir

    def __call__(
        self,
        config: Config,
        worker: str = "echo",
        *,
        engine: EngineId | None = None,
        context: RayContext | None = None,
    ) -> QueueGroup:
        group = start_ray_actors(
            engine or new_engine(),
            msgspec.structs.replace(config, ray=with_test_modules(config)),
            runtime_dir=self._runtime_dir,
            context=context,
            worker=f"ray_workers:{worker}",
        )
        self._stack.callback(group.close)
        return group


def with_test_modules(config: Config) -> RayConfig:
    theirs = config.ray.ray_runtime_env
    env_vars = {"PYTHONPATH": HERE, **theirs.get("env_vars", {})}
    return msgspec.structs.replace(config.ray, ray_runtime_env={**theirs, "env_vars": env_vars})


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        yield Start(stack, runtime_dir)


def facts(group: QueueGroup) -> list[Facts]:
    replies = Executor(group).call(OpenGroup("engine"), GroupOpened, timeout=20)
    return [msgspec.json.decode(reply.store or "", type=Facts) for reply in replies]


def lost(group: QueueGroup, seconds: float) -> str:
    """Return the error about a lost worker that is noticed within `seconds`."""
    deadline = time.monotonic() + seconds
    with pytest.raises(WorkerLost) as caught:
        while time.monotonic() < deadline:
            group.receive(deadline - time.monotonic())
    return str(caught.value)


def ips(nodes: list[str]) -> list[str]:
    return [ray_cluster.node_ips()[node] for node in nodes]


def test_start_ray_actors_workers_on_the_engines_node_use_shared_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SETTING", "1")
    monkeypatch.setenv("DOLLARS", "$HOME ${PATH}")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    engine = new_engine()
    group = start(config(tp=2), engine=engine)
    said = facts(group)
    assert [one.rank for one in said] == [0, 1]
    assert [one.label for one in said] == ["engine-0/tp0-pp0", "engine-0/tp1-pp0"]
    assert said[0].nodes == [ray_cluster.here()] * 2
    assert {one.medium for one in said} == {"shared memory"}
    assert [one.device_index for one in said] == [0, 1], "no GPUs are assigned: a GPU each, where there are any"
    if os.geteuid() == 0:
        assert [one.niceness for one in said] == [0, 0]  # Ray's is 15
    for one in said:
        assert one.environment["SOME_SETTING"] == "1"
        assert one.environment["DOLLARS"] == "$HOME ${PATH}"
        assert not {"HF_TOKEN", "OMP_NUM_THREADS"} & one.environment.keys()
    names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    assert names == {f"{engine.instance}/engine-0/tp0-pp0", f"{engine.instance}/engine-0/tp1-pp0"}
    assert [ray_cluster.pid_of(name) for name in sorted(names)] == [one.pid for one in said]
    group.close()
    group.close()


def test_start_ray_actors_variables_of_workers_are_in_no_file_or_command_line_of_ray(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables are sent by message, and so is a secret of the user's runtime_env; other secrets are withheld."""
    monkeypatch.setenv("SOME_SETTING", CANARY)
    monkeypatch.setenv("DATABASE_URL", "postgres://u:pw@host/" + CANARY)
    monkeypatch.setenv("INCLUDED_TOKEN", CANARY)
    theirs = {"env_vars": {"GIVEN_TOKEN": CANARY}}
    group = start(config(tp=2, ray_runtime_env=theirs, ray_env_include=["INCLUDED_*"]))
    for one in facts(group):
        assert {one.environment.get(name) for name in ("SOME_SETTING", "INCLUDED_TOKEN", "GIVEN_TOKEN")} == {CANARY}
        assert "DATABASE_URL" not in one.environment
    group.close()
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    assert list(session.glob("logs/raylet.out"))
    found = [path for path in session.rglob("*") if path.is_file() and CANARY in path.read_text(errors="replace")]
    assert not found
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if CANARY in _read(path)]
    assert not [
        path for path in Path("/proc").glob("[0-9]*/environ") if "RAY_" in _read(path) and CANARY in _read(path)
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has exited
        return ""


def test_start_ray_actors_workers_on_several_nodes_use_tcp(start: Start) -> None:
    group = start(config(tp=2, pp=2, ray_placement_strategy="STRICT_SPREAD"), "echo_by_tcp")
    said = facts(group)
    assert said[0].nodes[0] == ray_cluster.here()
    assert len(set(said[0].nodes)) == 4
    assert said[0].addresses == ips(said[0].nodes)
    assert [one.medium for one in said] == ["tcp"] * 4
    assert [one.label for one in said] == [f"engine-0/tp{tp}-pp{pp}" for pp in (0, 1) for tp in (0, 1)]


def test_start_ray_actors_workers_use_the_gpus_that_ray_assigned(start: Start) -> None:
    group = start(config(tp=3, resources={"GPU": 1.0}))
    said = facts(group)
    on = dict(zip(said[0].nodes, [0] * 3, strict=True))
    for one, node in zip(said, said[0].nodes, strict=True):
        assert one.device_index == on[node]
        on[node] += 1
        assert "CUDA_VISIBLE_DEVICES" not in one.environment


@pytest.mark.grid  # tests/unit/cluster/test_bundles.py divides groups and devices
def test_start_ray_actors_two_engines_share_a_group_by_indices_and_a_device_by_fractions(
    start: Start, make_group: MakeGroup
) -> None:
    group_id = make_group({"GPU": 1.0}, {"GPU": 1.0}, strategy="STRICT_PACK")
    half = {"GPU": 0.5}
    instance = new_engine().instance
    wanted = config(tp=2, placement_group=group_id, resources=half, bundle_indices=[1, 0])
    engines = [start(wanted, engine=EngineId(instance, rank)) for rank in (0, 1)]
    said = [facts(group) for group in engines]
    assert [one.device_index for one in said[0]] == [one.device_index for one in said[1]]
    assert {one.device_index for one in said[0]} == {0, 1}
    assert said[1][0].label == "engine-1/tp0-pp0"
    for group in engines:
        group.close()
    assert placement_group_table()[group_id]["state"] == "CREATED"


def test_start_ray_actors_waits_for_a_bundle_that_another_engine_holds_and_names_it(
    start: Start, make_group: MakeGroup
) -> None:
    group_id = make_group(ACC, ACC)
    first = start(config(placement_group=group_id, bundle_indices=[0]))
    with pytest.raises(ClusterError, match=r"bundle 0 of .* somebody else holds it; waited 1 s"):
        start(config(placement_group=group_id, bundle_indices=[0], ray_placement_timeout=1.0))
    second = start(config(placement_group=group_id))  # finds the other bundle
    assert facts(second)[0].pid != facts(first)[0].pid


@pytest.mark.parametrize(
    ("kill", "said"),
    [(signal.SIGKILL, "its process died"), (signal.SIGTERM, "SIGTERM")],
)
def test_ray_group_killed_worker_is_noticed_at_once(start: Start, kill: int, said: str) -> None:
    group = start(config(tp=2))
    os.kill(facts(group)[1].pid, kill)
    message = lost(group, NOTICE_SECONDS)
    assert message.startswith("worker engine-0/tp1-pp0: ")
    assert said in message
    assert "on node " in message
    assert "\n" not in message
    with pytest.raises(WorkerLost):
        group.check()


def test_ray_group_monitor_that_fails_is_a_lost_worker(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("injected")

    group = start(config(tp=2))
    monkeypatch.setattr("eagleray.cluster.actor_monitor.exit_reason", fail)
    os.kill(facts(group)[1].pid, signal.SIGKILL)
    assert "it can no longer be watched: RuntimeError: injected" in lost(group, NOTICE_SECONDS)


def test_ray_group_removed_placement_group_is_a_lost_worker_with_its_cause(start: Start, make_group: MakeGroup) -> None:
    group_id = make_group(ACC)
    group = start(config(placement_group=group_id))
    ray_cluster.remove(group_id)
    assert "placement group was removed" in lost(group, 5)


@pytest.mark.parametrize(
    ("worker", "kind", "said"),
    [
        ("raises", WorkerFailed, r"engine-0/tp1-pp0 ended: KeyError: 'no such weight'"),
        ("is_killed", WorkerLost, r"engine-0/tp1-pp0: its process died"),
        pytest.param("ends", WorkerLost, r"engine-0/tp1-pp0: it has ended", marks=pytest.mark.grid),
        pytest.param("nosuch", WorkerFailed, r"engine-0/tp.-pp0 ended: AttributeError", marks=pytest.mark.grid),
    ],
)
def test_start_ray_actors_worker_lost_before_it_attaches_raises(
    start: Start, worker: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        start(config(tp=2), worker)


def test_start_ray_actors_user_error_of_a_worker_reaches_the_user(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"^option `device`: there is none$"):
        start(config(), "refuses")


def test_start_ray_actors_workers_that_never_attach_raise_at_the_deadline(start: Start) -> None:
    with pytest.raises(DeadlineExceeded, match="did not attach"):
        start(config(startup_timeout=8.0), "hangs")


def test_ray_group_close_kills_a_worker_that_does_not_exit(start: Start) -> None:
    group = start(config(), "will_not_end")
    pid = facts(group)[0].pid
    group.close()
    assert not Path(f"/proc/{pid}").exists() or ray_cluster.wait_until(lambda: not Path(f"/proc/{pid}").exists(), 3)


@pytest.mark.grid
def test_start_ray_actors_failure_after_any_stage_leaves_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixtures check that nothing is left."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("injected")

    for target in (
        "eagleray.cluster.worker_actors.spawn",
        "eagleray.cluster.spawn.ActorHandles.get_info",
        "eagleray.cluster.worker_actors.resolve_topology",
        "eagleray.executor.ray_actors.MessageQueueHub.open",
        "eagleray.executor.worker_specs.HeartbeatMonitor.open",
        "eagleray.cluster.spawn.ActorHandles.run",
        "eagleray.executor.ray_actors.ActorMonitor",
        "eagleray.executor.ray_actors.MessageQueueHub.wait_for_peers",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, fail)
            with pytest.raises(RuntimeError, match="injected"):
                start(config())
        assert not ray_cluster.actors_and_groups(), target


def test_start_ray_actors_runtime_env_that_cannot_be_set_up_is_refused(start: Start) -> None:
    broken = {"working_dir": "/nonexistent.zip"}
    with pytest.raises((ClusterError, ConfigError), match="nonexistent"):
        start(config(ray_runtime_env=broken))


def test_start_ray_actors_inside_an_actor_uses_its_placement_group(make_group: MakeGroup) -> None:
    group_id = make_group({"CPU": 1.0}, FAR, FAR)
    strategy = PlacementGroupSchedulingStrategy(placement_groups.handle(group_id), placement_group_bundle_index=0)
    runtime_env = {"env_vars": {"PYTHONPATH": HERE}}
    options = {"num_cpus": 1, "scheduling_strategy": strategy, "runtime_env": runtime_env}
    caller = ray.remote(Caller).options(**options).remote()
    try:
        took, *pids = ray.get(caller.start_engine.remote(), timeout=60).split()
    finally:
        ray.kill(caller)
    assert took == group_id
    assert len(pids) == 2


def test_ray_group_workers_exit_with_a_killed_engine(cluster: str) -> None:
    context = msgspec.json.encode(RayContext(address=cluster)).decode()
    with tempfile.TemporaryDirectory(prefix="er-") as sockets:
        command = [sys.executable, str(Path(HERE) / "engine_program.py"), context, sockets]
        program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with program:
            assert program.stdout is not None
            _, *pids = program.stdout.readline().split()
            assert len(pids) == 2
            program.kill()
    assert ray_cluster.wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5)


def test_ray_group_stopped_worker_is_lost_without_heartbeats(start: Start) -> None:
    group = start(config(heartbeat_timeout=1.0))
    os.kill(facts(group)[0].pid, signal.SIGSTOP)
    assert "it was silent for" in lost(group, 10)


def test_ray_group_lost_node_is_noticed_and_named(start: Start, cluster: str, add_node: AddNode) -> None:
    remove = add_node(resources={"short": 1}, node_ip_address="127.0.0.9")
    group = start(config(resources={"short": 1.0}))
    assert group.topology.addresses == ["127.0.0.9"]
    remove()
    assert "on node 127.0.0.9 " in lost(group, 5)
