"""Engines that are Ray actors: their placement, their exits, and the clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_cluster
from checkpoints import make_checkpoint
from harness import LocalEngine
from processes import children_of
from ray.util.placement_group import placement_group_table
from ray_cluster import ACC, AddNode, MakeGroup, new_engine, wait_until
from ray_fleet import SECONDS, Engine, fleet

from eagleray.config.sections import Config
from eagleray.errors import ClusterError
from eagleray.messages.workers import RayContext

HERE = str(Path(__file__).parent)
NOTICE_SECONDS = 5.0
PROMPT = [5, 6, 7, 8]
MODEL = {"num_threads": 1, "num_kv_blocks": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("engines"), "qwen3"))


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[int]:
    with LocalEngine(Path(checkpoint), executor="in-process", **MODEL) as engine:
        engine.add("0", PROMPT, max_tokens=8)
        return engine.run()["0"].token_ids


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def config(cluster: str, size: int = 2, **options: Any) -> Config:
    env_vars = {"PYTHONPATH": f"{HERE}:{Path(HERE).parent}"}
    return ray_cluster.config(
        options.pop("tp", 1),
        ray_address=cluster,
        data_parallel_size=size,
        data_parallel_backend="ray",
        **{"ray_runtime_env": {"env_vars": env_vars}, **options},
    )


def instance() -> str:
    return new_engine().instance


def stand_in(name: str) -> dict[str, str]:
    return {"target": f"ray_stand_ins:{name}"}


async def facts(*engines: Engine) -> list[dict[str, Any]]:
    """Return the facts that the stand-ins report as their addresses, once they are bound."""
    for engine in engines:
        async with asyncio.timeout(SECONDS):
            await engine.bound.wait()
        assert engine.address is not None, engine.ends
    return [json.loads(engine.address or "") for engine in engines]


def ips(reported: list[dict[str, Any]]) -> list[str]:
    return [ray_cluster.node_ips()[one["node"]] for one in reported]


def groups() -> set[str]:
    return {entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"}


def actors() -> set[str]:
    return {entry["Name"] for entry in ray_cluster.living_actors()}


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.slow  # test_ray_serve.py and test_ray_expert_parallel.py kill engines
@in_loop
async def test_ray_launcher_two_engines_generate_same_tokens_after_replacement(
    cluster: str, checkpoint: str, expected: list[int]
) -> None:
    """The same holds after one of them was replaced; no actor name is used twice."""
    name = instance()
    options = config(cluster, model=checkpoint, ray_engine_placement="strict-spread", **MODEL)
    async with fleet(options, name) as made:
        first, second = await made.start(0, 1)
        assert made.launcher.host == ray_cluster.node_ips()[ray_cluster.here()]
        assert groups() == {f"{name}/engine-0", f"{name}/engine-1"}
        assert actors() == {f"{name}/engine-{n}{worker}" for n in (0, 1) for worker in ("", "/tp0-pp0")}
        assert first.address.rpartition(":")[0] != second.address.rpartition(":")[0], "on nodes of their own"
        for engine in (first, second):
            assert await made.generate(engine, PROMPT) == expected

        os.kill(ray_cluster.pid_of(f"{name}/engine-1"), signal.SIGKILL)
        assert "its process died" in await second.end(NOTICE_SECONDS)
        assert not second.failures
        replacement = made.spawn(1, incarnation=1)
        await made.attach(replacement)
        assert f"{name}/engine-1.1/tp0-pp0" in actors()
        assert await made.generate(replacement, PROMPT) == expected

        os.kill(ray_cluster.pid_of(f"{name}/engine-0/tp0-pp0"), signal.SIGKILL)
        assert "worker engine-0/tp0-pp0: its process died" in (await made.failing()).message
        assert "worker engine-0/tp0-pp0: its process died" in await first.end()
        assert [failure.kind for failure in first.failures] == ["WorkerLost"]
        await made.stop(replacement)
        assert replacement.ends == ["it has ended"]


@pytest.mark.parametrize(
    ("executor", "tp"),
    [
        # an engine without workers of its own starts, and reads a wrong checkpoint, below
        pytest.param("in-process", 1, marks=pytest.mark.grid),
        ("processes", 2),
    ],
)
@in_loop
async def test_ray_launcher_workers_not_actors_engine_takes_their_resources(
    cluster, checkpoint, expected, executor, tp
):
    options = config(cluster, 1, model=checkpoint, executor=executor, tp=tp, **MODEL)
    name = instance()
    async with fleet(options, name) as made:
        (engine,) = await made.start(0)
        assert actors() == {f"{name}/engine-0"}
        (entry,) = (e for e in placement_group_table().values() if e["name"] == f"{name}/engine-0")
        assert entry["bundles"] == {0: {"acc": tp}}
        assert await made.generate(engine, PROMPT) == expected
        workers = children_of(ray_cluster.pid_of(f"{name}/engine-0"))
        assert len(workers) == (tp if executor == "processes" else 0)
        engine.spawned.kill()
        await engine.end()
        assert wait_until(lambda: all(is_gone(pid) for pid in workers), NOTICE_SECONDS)


@pytest.mark.grid
@in_loop
async def test_ray_launcher_ray_graph_executor_generates(cluster, checkpoint, expected):
    options = config(cluster, 1, model=checkpoint, executor="ray-graph", tp=2, **MODEL)
    async with fleet(options, instance()) as made:
        (engine,) = await made.start(0)
        assert await made.generate(engine, PROMPT) == expected
        await made.stop(engine)


@in_loop
async def test_ray_launcher_engine_has_programs_environment_and_own_directory(cluster, monkeypatch):
    monkeypatch.setenv("SOME_SETTING", "$HOME")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    async with fleet(config(cluster, 1, tp=2), instance(), **stand_in("Waits")) as made:
        engine = made.spawn(0)
        (reported,) = await facts(engine)
        assert reported["setting"] == "$HOME"
        assert reported["secret"] is None and reported["omp"] is None
        if os.geteuid() == 0:
            assert reported["niceness"] == 0
        assert reported["host"] == ray_cluster.node_ips()[reported["node"]]
        assert reported["bundles"] == [0, 1]
        assert Path(reported["directory"]).is_dir()
        os.kill(reported["pid"], signal.SIGKILL)
        assert "on node " in await engine.end(NOTICE_SECONDS)
        assert wait_until(lambda: not Path(reported["directory"]).exists(), NOTICE_SECONDS)
        assert wait_until(lambda: not groups(), NOTICE_SECONDS)


@in_loop
async def test_ray_engine_terminate_and_kill_remove_everything(cluster):
    async with fleet(config(cluster), instance(), **stand_in("Waits")) as made:
        engines = [made.spawn(0), made.spawn(1)]
        reported = await facts(*engines)
        os.kill(reported[1]["pid"], signal.SIGSTOP)
        engines[0].spawned.terminate()
        engines[1].spawned.kill()
        for engine, one in zip(engines, reported, strict=True):
            assert await engine.end() == "it was told to end"
            assert wait_until(lambda pid=one["pid"]: is_gone(pid), NOTICE_SECONDS)
            assert wait_until(lambda path=one["directory"]: not Path(path).exists(), NOTICE_SECONDS)
            engine.spawned.kill()  # harmless
        assert not groups()


@pytest.mark.grid  # the fixtures find what a launcher leaves
@in_loop
async def test_ray_launcher_close_kills_engines(cluster):
    async with fleet(config(cluster), instance(), **stand_in("Waits")) as made:
        engines = [made.spawn(0), made.spawn(1)]
        reported = await facts(*engines)
    assert all(is_gone(one["pid"]) or wait_until(lambda p=one["pid"]: is_gone(p), NOTICE_SECONDS) for one in reported)
    assert not any(Path(one["directory"]).exists() for one in reported)
    assert all(len(engine.ends) == 1 for engine in engines)


@in_loop
async def test_ray_launcher_driver_killed_ends_engines_and_next_spawn_starts_driver(cluster):
    async with fleet(config(cluster), instance(), **stand_in("Waits")) as made:
        engines = [made.spawn(0), made.spawn(1)]
        reported = await facts(*engines)
        made.launcher.kill()
        for engine in engines:
            assert (await engine.end(NOTICE_SECONDS)).startswith("the process that drives Ray ended: it was killed by")
        for one in reported:
            assert wait_until(lambda pid=one["pid"]: is_gone(pid), NOTICE_SECONDS)
            assert wait_until(lambda path=one["directory"]: not Path(path).exists(), NOTICE_SECONDS)
        assert wait_until(lambda: not ray_cluster.actors_and_groups(), NOTICE_SECONDS)
        again = made.spawn(0, incarnation=1)
        await facts(again)


@pytest.mark.parametrize(
    ("what", "kind", "message", "is_the_users"),
    [
        ("Raises", "CheckpointError", "model.safetensors: it is broken", True),
        ("Refuses", "KeyError", "'no such interface'", False),
    ],
)
@in_loop
async def test_ray_engine_raises_is_reported(cluster, what, kind, message, is_the_users):
    async with fleet(config(cluster, 1), instance(), **stand_in(what)) as made:
        engine = made.spawn(0)
        reason = await engine.end()
        (failure,) = engine.failures
        assert (failure.kind, failure.message, failure.is_user_error) == (kind, message, is_the_users)
        assert str(failure) == reason


@in_loop
async def test_ray_engine_returns_is_reported(cluster):
    async with fleet(config(cluster, 1), instance(), **stand_in("Ends")) as made:
        assert await made.spawn(0).end() == "it has ended"


@in_loop
async def test_ray_engine_wrong_checkpoint_is_reported(cluster, tmp_path):
    """An attached engine reports it itself, and its actor's exit is reported too."""
    options = config(cluster, 1, model=str(tmp_path), executor="in-process", **MODEL)
    async with fleet(options, instance()) as made:
        engine = made.spawn(0)
        with contextlib.suppress(AssertionError):
            await made.attach(engine)
        await engine.end()
        (failure,) = engine.failures
        assert failure.kind == "CheckpointError" and failure.is_user_error
        assert str(tmp_path) in failure.message


@in_loop
async def test_ray_launcher_engines_do_not_fit_error_names_what_fits(cluster):
    options = config(cluster, 4, tp=2, ray_placement_timeout=1000.0, ray_placement_strategy="STRICT_PACK")
    async with fleet(options, instance(), **stand_in("Waits")) as made:
        engines = [made.spawn(rank) for rank in range(4)]
        reason = await engines[3].end()
        assert "the cluster cannot hold 4 engines of 2 workers of {acc: 1}, each on one node (STRICT_PACK)" in reason
        assert "node 127.0.0.4 " in reason and "`data_parallel_size` 3 or `tensor_parallel_size` 1 would fit" in reason
        assert [failure.kind for failure in engines[3].failures] == ["ClusterError"]
        assert len({one["node"] for one in await facts(*engines[:3])}) == 3


@in_loop
async def test_ray_launcher_resources_held_by_others_waits(cluster, make_group: MakeGroup):
    group = make_group(*[ACC] * 7)
    async with fleet(config(cluster), instance(), **stand_in("Waits")) as made:
        waits, is_ended = made.spawn(0), made.spawn(1)
        assert not is_ended.ends
        is_ended.spawned.kill()
        assert await is_ended.end() == "it was told to end"
        ray_cluster.remove(group)
        await facts(waits)
    late = config(cluster, 1, ray_placement_timeout=0.5)
    make_group(*[ACC] * 7)
    async with fleet(late, instance(), **stand_in("Waits")) as made:
        reason = await made.spawn(0).end()
        assert "but others hold a part" in reason and "(`ray_placement_timeout`)" in reason


@pytest.mark.parametrize(
    ("policy", "nodes"),
    [
        # tests/unit/cluster/test_engine_placement.py has every policy
        pytest.param("pack", ["head", "head", "other"], marks=pytest.mark.grid),
        pytest.param("spread", ["127.0.0.2", "127.0.0.3", "127.0.0.4", "head"], marks=pytest.mark.grid),
        pytest.param("strict-spread", ["127.0.0.2", "127.0.0.3", "127.0.0.4", "head"], marks=pytest.mark.grid),
    ],
)
@in_loop
async def test_ray_launcher_placement_policy_chooses_nodes(cluster, policy, nodes):
    options = config(cluster, len(nodes), ray_engine_placement=policy)
    async with fleet(options, instance(), **stand_in("Waits")) as made:
        found = ips(await facts(*[made.spawn(rank) for rank in range(len(nodes))]))
    head = ray_cluster.node_ips()[ray_cluster.here()]
    if policy == "pack":
        assert found[:2] == [head, head] and found[2] != head
    else:
        assert sorted(found) == sorted(head if node == "head" else node for node in nodes)
        assert found[0] == head


@pytest.mark.grid  # tests/unit/cluster/test_placement.py chooses among named nodes
@in_loop
async def test_ray_launcher_ray_nodes_restricts_placement(cluster):
    id_of = {ip: node for node, ip in ray_cluster.node_ips().items()}
    names = [id_of["127.0.0.3"][:8], "127.0.0.4"]
    options = config(cluster, 3, ray_nodes=names)
    async with fleet(options, instance(), **stand_in("Waits")) as made:
        found = ips(await facts(*[made.spawn(rank) for rank in range(3)]))
        assert sorted(found) == ["127.0.0.3", "127.0.0.3", "127.0.0.4"]
    with pytest.raises(ClusterError, match=r"option `ray_nodes`: no node is 'nosuch'; .* 127\.0\.0\.2 \("):
        async with fleet(config(cluster, 1, ray_nodes=["nosuch"]), instance()):
            pass


@in_loop
async def test_ray_launcher_programs_group_is_divided_among_engines(cluster, make_group: MakeGroup):
    group = make_group(*[ACC] * 4)
    context = RayContext(address=cluster, placement_group=group)
    async with fleet(config(cluster, tp=2), instance(), ray=context, **stand_in("Waits")) as made:
        reported = await facts(made.spawn(0), made.spawn(1))
        assert {one["group"] for one in reported} == {group}
        assert sorted(reported[0]["bundles"] + reported[1]["bundles"]) == [0, 1, 2, 3]
        assert len(groups()) == 1
    assert placement_group_table()[group]["state"] == "CREATED"


@pytest.mark.grid  # a group without a name is used above
@in_loop
async def test_ray_launcher_named_group_is_used(cluster, make_group: MakeGroup):
    group = make_group({"acc": 2.0}, name="mine")
    options = config(cluster, placement_group="mine")
    async with fleet(options, instance(), **stand_in("Waits")) as made:
        reported = await facts(made.spawn(0), made.spawn(1))
        assert [(one["group"], one["bundles"]) for one in reported] == [(group, [0])] * 2
    async with fleet(config(cluster, 3, placement_group="mine"), instance(), **stand_in("Waits")) as made:
        assert "it has room for 2 of 3 engines" in await made.spawn(0).end()


@pytest.mark.grid
@in_loop
async def test_ray_launcher_user_group_workers_use_engines_bundles(
    cluster, checkpoint, expected, make_group: MakeGroup
):
    group = make_group(*[ACC] * 4)
    options = config(cluster, model=checkpoint, tp=2, placement_group=group, **MODEL)
    async with fleet(options, instance()) as made:
        engines = await made.start(0, 1)
        for engine in engines:
            assert await made.generate(engine, PROMPT) == expected
        await made.stop(*engines)


@pytest.mark.grid
@in_loop
async def test_ray_launcher_two_instances_share_cluster(cluster):
    async with (
        fleet(config(cluster), instance(), **stand_in("Waits")) as one,
        fleet(config(cluster), instance(), **stand_in("Waits")) as other,
    ):
        await facts(*[made.spawn(rank) for made in (one, other) for rank in (0, 1)])
        assert len(actors()) == len(groups()) == 4


@in_loop
async def test_ray_launcher_node_removed_is_cluster_lost(cluster, add_node: AddNode):
    remove = add_node(resources={"short": 1}, node_ip_address="127.0.0.9")
    options = config(cluster, 1, resources={"short": 1.0})
    async with fleet(options, instance(), **stand_in("Waits")) as made:
        engine = made.spawn(0)
        await facts(engine)
        remove()
        assert "on node 127.0.0.9 " in await engine.end(2 * NOTICE_SECONDS)
        again = made.spawn(0, incarnation=1)
        assert "the cluster cannot hold an engine of {short: 1}" in await again.end()
        assert [failure.kind for failure in again.failures] == ["ClusterLost"], (
            "it fitted once, so the user made no mistake"
        )


@pytest.mark.slow  # test_ray_workers.py removes the node of a worker
@in_loop
async def test_ray_launcher_node_removed_during_bind_is_worker_lost(cluster, add_node, tmp_path):
    """The replacement is placed on the node that is left."""
    remove = add_node(resources={"short": 1}, node_ip_address="127.0.0.9")
    env_vars = {"PYTHONPATH": f"{HERE}:{Path(HERE).parent}", "LINGERS": str(tmp_path / "lingers")}
    options = config(cluster, 1, resources={"short": 1.0}, ray_runtime_env={"env_vars": env_vars})
    async with fleet(options, instance(), **stand_in("Lingers")) as made:
        engine = made.spawn(0)
        while not (tmp_path / "lingers").exists():
            assert not engine.ends
            await asyncio.sleep(0.02)
        remove()
        await engine.end(2 * NOTICE_SECONDS)
        (failure,) = engine.failures
        assert failure.kind == "WorkerLost" and not failure.is_user_error
        add_node(resources={"short": 1}, node_ip_address="127.0.0.10")
        (reported,) = await facts(made.spawn(0, incarnation=1))
        assert ips([reported]) == ["127.0.0.10"]


@pytest.mark.grid  # it starts an engine for one sentence
@in_loop
async def test_ray_launcher_instance_name_in_use_raises_cluster_error(cluster):
    options = config(cluster, 1)
    async with fleet(options, "prod@1", **stand_in("Waits")) as made:
        await facts(made.spawn(0))
        assert groups() == actors() == {"prod/engine-0"}
        with pytest.raises(ClusterError, match="option `instance_name` is prod, but another instance of that name"):
            async with fleet(options, "prod@2"):
                pass


@in_loop
async def test_ray_launcher_unreachable_cluster_raises_cluster_error(cluster):
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1:1: cannot be reached"):
        async with fleet(config("127.0.0.1:1"), instance()):
            pass


@pytest.fixture
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Yield the address of a cluster that the test may damage, and the process id of its control store."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "2")
    command = [sys.executable, str(Path(HERE) / "cluster_program.py")]
    with tempfile.TemporaryDirectory(prefix="er-") as home, contextlib.ExitStack() as ends:
        monkeypatch.setenv("RAY_TMPDIR", home)
        program = ends.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert program.stdout is not None
        address, store = program.stdout.readline().split()
        yield address, int(store)
        program.communicate(timeout=60)


@pytest.mark.slow  # test_ray_connect.py kills the control store
@in_loop
async def test_ray_launcher_control_store_killed_later_engines_report_cluster_lost(cluster, own_cluster):
    """The supervisor's process survives, and later engines report why they cannot start."""
    address, store = own_cluster
    options = config(address, resources={"CPU": 1.0})
    async with fleet(options, instance(), **stand_in("Waits")) as made:
        engine = made.spawn(0)
        await facts(engine)
        os.kill(store, signal.SIGKILL)
        assert "the process that drives Ray ended" in await engine.end()
        for incarnation in (1, 2):
            again = made.spawn(0, incarnation)
            assert f"Ray cluster {address}: cannot be reached" in await again.end()
            assert [failure.kind for failure in again.failures] == ["ClusterLost"]
