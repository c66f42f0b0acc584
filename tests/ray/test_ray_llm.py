"""`LLM` on Ray in a driver, in an actor, and in a placement group of the user."""

from __future__ import annotations

import os
import signal
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


@pytest.mark.grid  # test_ray_engines.py has the groups, test_ray_model_ids.py an LLM with such an engine
def test_llm_engines_that_are_actors_have_a_group_each(cluster, checkpoint, expected):
    options = {"data_parallel_backend": "ray", "data_parallel_size": 2, "ray_worker_resources": ACC}
    with LLM(checkpoint, ray_address=cluster, **options, **ON_RAY) as llm:
        assert texts(llm) == expected
        assert num_groups() == 2


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
