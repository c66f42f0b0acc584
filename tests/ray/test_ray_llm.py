"""`LLM` on Ray in a driver, in an actor, and in a placement group of the user."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import ray
import ray_cluster
from checkpoints import make_checkpoint
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_cluster import ACC

from eagleray import LLM, SamplingParams
from eagleray.cluster import placement_groups
from eagleray.errors import ClusterError, EngineFailed
from eagleray.fleet.timeouts import DRAIN_POLL_SECONDS

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = ["The quick brown fox", "Hello there"]
OPTIONS = {"num_threads": 1, "num_kv_blocks": 128, "max_num_seqs": 8}
ON_RAY = {**OPTIONS, "ray_placement_timeout": 20}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("llm"), "qwen3"))


@pytest.fixture(scope="module")
def expected(checkpoint):
    with LLM(checkpoint, executor="in-process", **OPTIONS) as llm:
        return texts(llm)


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def num_groups() -> int:
    return sum(entry["state"] != "REMOVED" for entry in placement_group_table().values())


@pytest.mark.grid  # test_ray_engines.py divides a program's group, test_ray_workers.py starts workers in an actor's
def test_llm_uses_the_users_placement_group(cluster, checkpoint, expected, make_group):
    group = placement_groups.handle(make_group({"acc": 1}, {"acc": 1}, {"acc": 1}))
    with LLM(
        checkpoint,
        placement_group=group,
        bundle_indices=[2, 0],
        pipeline_parallel_size=2,
        ray_worker_resources=ACC,
        **ON_RAY,
    ) as llm:
        assert texts(llm) == expected
        assert num_groups() == 1


class Program:
    """A user's actor."""

    def generate(self, checkpoint: str) -> list[str]:
        with LLM(checkpoint, tensor_parallel_size=2, ray_worker_resources=ACC, **ON_RAY) as llm:
            assert num_groups() == 1
            return texts(llm)


@pytest.mark.grid  # test_ray_workers.py starts workers in an actor's group, and the test below an LLM in an actor
def test_llm_in_an_actor_uses_its_placement_group(cluster, checkpoint, expected, make_group):
    """The program itself checks that no second group is created."""
    group = placement_groups.handle(make_group({"CPU": 1, "acc": 1}, {"acc": 1}))
    here = os.path.dirname(__file__)
    env_vars = {"PYTHONPATH": f"{here}:{os.path.dirname(here)}"}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    program = ray.remote(Program).options(num_cpus=1, scheduling_strategy=strategy, runtime_env={"env_vars": env_vars})
    actor = program.remote()
    try:
        assert ray.get(actor.generate.remote(checkpoint), timeout=90) == expected
    finally:
        ray.kill(actor)


class Holder:
    """A user's actor that holds all of the one bundle of its placement group."""

    def try_ray(self, checkpoint: str) -> str:
        began = time.monotonic()
        with pytest.raises(ClusterError) as caught:
            LLM(checkpoint, executor="ray", **OPTIONS)
        assert time.monotonic() - began < 20, "no waiting would help"
        return str(caught.value)

    def generate(self, checkpoint: str) -> list[str]:
        with LLM(checkpoint, **OPTIONS) as llm:
            assert len(ray_cluster.living_actors()) == 1, "the engine computes itself"
            return texts(llm)


@pytest.mark.slow  # test_ray_workers.py starts workers in an actor's group
def test_llm_in_an_actor_that_holds_its_group_computes_there(cluster, checkpoint, expected, make_group):
    group = placement_groups.handle(make_group({"CPU": 1}))
    here = os.path.dirname(__file__)
    env_vars = {"PYTHONPATH": f"{here}:{os.path.dirname(here)}"}
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    holder = ray.remote(Holder).options(num_cpus=1, scheduling_strategy=strategy, runtime_env={"env_vars": env_vars})
    actor = holder.remote()
    try:
        said = ray.get(actor.try_ray.remote(checkpoint), timeout=60)
        assert "Holder.try_ray (actor " in said
        assert "holds {CPU: 1} of bundle 0 itself" in said
        assert ray.get(actor.generate.remote(checkpoint), timeout=60) == expected
    finally:
        ray.kill(actor)


def kill_a_worker() -> None:
    (name,) = [e["Name"] for e in ray_cluster.living_actors() if e["Name"].endswith("/tp1-pp0")]
    os.kill(ray_cluster.pid_of(name), signal.SIGKILL)


def test_llm_in_a_driver_creates_one_placement_group_and_replaces_a_killed_worker(cluster, checkpoint, expected):
    with LLM(checkpoint, executor="ray", tensor_parallel_size=2, ray_worker_resources=ACC, **ON_RAY) as llm:
        assert texts(llm) == expected
        assert num_groups() == 1
        kill_a_worker()
        assert texts(llm) == expected


@pytest.mark.grid  # test_ray_workers.py names a killed worker, test_processes_of_a_server.py gives an engine up
def test_llm_killed_worker_of_an_engine_without_restarts_is_named_in_the_error(cluster, checkpoint):
    options = {"executor": "ray", "tensor_parallel_size": 2, "ray_worker_resources": ACC, "max_engine_restarts": 0}
    with LLM(checkpoint, **options, **ON_RAY) as llm:
        texts(llm)
        kill_a_worker()
        began = time.monotonic()
        with pytest.raises(EngineFailed, match=r"worker engine-0/tp1-pp0: "):
            while time.monotonic() < began + 30:
                texts(llm)


ENGINE_ACTORS = {**ON_RAY, "data_parallel_backend": "ray", "ray_worker_resources": ACC}


def engine_nodes() -> dict[str, str]:
    """Return the address of the node of each engine, by its label."""
    ips = ray_cluster.node_ips()
    entries = [e for e in placement_group_table().values() if e["state"] == "CREATED"]
    return {e["name"].partition("/")[2]: ips[e["bundles_to_node_id"][0]] for e in entries}


@pytest.mark.slow  # test_scale_server.py scales processes
def test_llm_engines_that_are_actors_are_scaled_while_requests_run(cluster, checkpoint):
    """A target that the cluster cannot hold is refused; engines are added and removed, and leave nothing behind."""
    long = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    with LLM(checkpoint, ray_address=cluster, executor="in-process", **ENGINE_ACTORS) as llm:

        def generate() -> list[list[int]]:
            return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, long, use_tqdm=False)]

        expected, found, has_scaled = generate(), [], threading.Event()

        def repeat() -> None:
            while not has_scaled.is_set():
                found.append(generate())

        requests = threading.Thread(target=repeat)
        requests.start()
        try:
            with pytest.raises(ClusterError, match=r"the cluster cannot hold 9 engines of \{acc: 1\}.* 7 would fit"):
                llm.scale(9)
            assert set(engine_nodes()) == {"engine-0"}
            assert llm.scale(2)["participating_ranks"] == [0, 1]
            assert set(engine_nodes()) == {"engine-0", "engine-1.1"}
            llm.scale(remove_ranks=[0])
            assert ray_cluster.wait_until(lambda: set(engine_nodes()) == {"engine-1.1"}, 5)
        finally:
            has_scaled.set()
            requests.join(60)
        assert found and all(tokens == expected for tokens in found)
        assert generate() == expected


@pytest.mark.slow  # the steps are in tests/unit: test_scaling.py, cluster/test_placement.py
def test_llm_engines_leave_nodes_that_drain_one_after_another(cluster, checkpoint, expected, add_node):
    for number in (1, 2):
        add_node(resources={"spot": 1}, node_ip_address=f"127.0.1.{number}")
    options = {**ENGINE_ACTORS, "ray_worker_resources": {"spot": 1}, "data_parallel_size": 2}
    with LLM(checkpoint, ray_address=cluster, **options) as llm:
        assert sorted(engine_nodes().values()) == ["127.0.1.1", "127.0.1.2"]
        for number in (1, 2):
            ray_cluster.drain(f"127.0.1.{number}", seconds=120)
        time.sleep(2 * DRAIN_POLL_SECONDS)
        assert set(engine_nodes()) == {"engine-0", "engine-1"}, "there is no room elsewhere"
        assert texts(llm) == expected
        with pytest.raises(ClusterError, match=r"3 engines of .*; not used because they drain: 127\.0\.1\.[12] "):
            llm.scale(3)
        add_node(resources={"spot": 2}, node_ip_address="127.0.1.3")
        moved = {"engine-0.1": "127.0.1.3", "engine-1.1": "127.0.1.3"}
        assert ray_cluster.wait_until(lambda: engine_nodes() == moved, 40)
        assert texts(llm) == expected


@pytest.mark.grid
def test_llm_engines_that_are_actors_share_the_users_placement_group(cluster, checkpoint, expected, make_group):
    group = placement_groups.handle(make_group({"acc": 1}, {"acc": 1}))
    options = {"data_parallel_backend": "ray", "data_parallel_size": 2, "ray_worker_resources": ACC}
    with LLM(checkpoint, placement_group=group, **options, **ON_RAY) as llm:
        assert texts(llm) == expected
        assert num_groups() == 1


def test_llm_resources_that_no_node_has_are_refused(cluster, checkpoint):
    with pytest.raises(ClusterError, match="unobtainium"):
        LLM(checkpoint, executor="ray", ray_worker_resources={"unobtainium": 1}, **ON_RAY)
