"""Workers in a compiled graph: nothing borrowed gets out of it, and what breaks it has a name."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import ray
import ray_cluster
from graph_edges import LONG_SECONDS
from ray.exceptions import RayChannelTimeoutError
from ray_cluster import FAR, config, new_engine

from eagleray.cluster.deadline import Deadline
from eagleray.cluster.worker_actors import open_worker_actors
from eagleray.config.sections import Config
from eagleray.errors import DeadlineExceeded, WorkerFailed, WorkerLost
from eagleray.executor.executor import Executor
from eagleray.executor.ray_graph.detach import is_borrowed
from eagleray.executor.ray_graph.graph import Graph, GraphActor, call_actors, lend, wait_until_alive
from eagleray.executor.ray_graph.group import start_ray_graph
from eagleray.identity import EngineId
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import CacheAllocated, GroupsOpened, LoadNullModel, NewRow, OpenGroups, StepPlan

pytestmark = pytest.mark.grid
"""`test_ray_agree` has the executor in the usual suite."""

HERE = str(Path(__file__).parent)
MAX_STEPS = 4


def with_our_modules(config: Config) -> Config:
    ray_config = msgspec.structs.replace(config.ray, ray_runtime_env={"env_vars": {"PYTHONPATH": HERE}})
    return msgspec.structs.replace(config, ray=ray_config)


@contextmanager
def graph(*, hosts: int = 1, timeout: float = 20.0, **options: Any) -> Iterator[tuple[Graph, list[Any]]]:
    """A graph over hosts that echo."""
    wait = Deadline(60, "startup_timeout")
    team = open_worker_actors(
        new_engine(),
        with_our_modules(config(hosts, **options)),
        context=None,
        wait=wait,
        kind=GraphActor,
        max_concurrency=2,
    )
    try:
        team.actors.run("graph_edges:make", [b""] * hosts)
        handles = [actor.handle for actor in team.actors.actors]
        wait_until_alive(handles, wait, lambda: None)
        made = Graph(handles, max_steps=MAX_STEPS, timeout=timeout)
        try:
            yield made, handles
        finally:
            made.close()
    finally:
        team.close()


def test_a_codec_that_lends_memory_stalls_the_graph(cluster):
    """What `detach` is for: a result that is held blocks the channel when it comes round to the same buffer."""
    with graph(timeout=5) as (made, _):
        made.results(made.execute([b"x"]))
        held = []
        with pytest.raises(RayChannelTimeoutError):
            for _ in range(3 * MAX_STEPS):
                held.append(made.results(made.execute([b"x"]), edge=lambda results: results))
        assert len(held) <= MAX_STEPS
        assert is_borrowed(held[0][0][1])
        held.clear()


@pytest.mark.parametrize("resources", [None, FAR])
def test_detached_results_may_be_held_for_ever(cluster, resources):
    with graph(hosts=2, timeout=10, resources=resources) as (made, hosts):
        held = [made.results(made.execute([b"x", np.arange(step)])) for step in range(5 * MAX_STEPS)]
        for step, results in enumerate(held):
            for header, own, echoed in results:
                assert header == b"x" and not is_borrowed(own) and not is_borrowed(echoed)
                assert np.array_equal(own.view(np.float32), np.full(1000, 2, np.float32))
                assert np.array_equal(echoed.view(np.int64), np.arange(step))
        beside = list(call_actors(hosts, [b"y"]))
        assert [answer[0] for answer in beside] == [b"y", b"y"]
        assert made.results(made.execute([b"nothing"])) == [[], []]


def test_frames_are_lent_without_copying():
    array = np.arange(5000)
    header, body = lend([b"header", array.data.cast("B")])
    assert header == b"header" and np.shares_memory(array, body)


@contextmanager
def executor(runtime_dir: Path, workers: int = 2, **options: Any) -> Iterator[tuple[Executor, EngineId]]:
    engine = new_engine()
    opened = Executor(
        start_ray_graph(engine, config(workers, executor="ray-graph", **options), runtime_dir=runtime_dir, context=None)
    )
    try:
        yield opened, engine
    finally:
        opened.close()


def pid_of(engine: EngineId, worker: str) -> int:
    return ray_cluster.pid_of(f"{engine.instance}/{engine.label}/{worker}")


def plan(step: int) -> StepPlan:
    if step:
        return StepPlan(step=step, freed_rows=[], new_rows=[], new_blocks=[], rows=[0], num_tokens=[1])
    start = NewRow(
        row=0,
        request_id="0",
        token_ids=[1, 2],
        num_prompt_tokens=2,
        num_computed_tokens=0,
        block_ids=[0],
        sampling=Sampling(seed=0),
    )
    return StepPlan(step=0, freed_rows=[], new_rows=[start], new_blocks=[], rows=[0], num_tokens=[2])


def test_steps_and_calls_by_turns(cluster, runtime_dir):
    with executor(runtime_dir) as (opened, _):
        for _ in range(2):
            opened.call(LoadNullModel(), CacheAllocated, timeout=30)
            pending = [opened.step(plan(step)) for step in range(3)]
            assert [step.result().token_ids for step in pending] == [[0]] * 3


def test_a_worker_that_raises_is_named(cluster, runtime_dir):
    with executor(runtime_dir) as (opened, _):
        opened.call(LoadNullModel(), CacheAllocated, timeout=30)
        with pytest.raises(WorkerFailed, match=r"engine-0/tp[01]-pp0: KeyError: 0"):
            opened.step(plan(1)).result()


@pytest.mark.parametrize("resources", [None, FAR])
def test_a_killed_worker_is_named(cluster, runtime_dir, resources):
    with executor(runtime_dir, resources=resources) as (opened, engine):
        opened.call(LoadNullModel(), CacheAllocated, timeout=30)
        pid = pid_of(engine, "tp1-pp0")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="engine-0/tp1-pp0"):
            for step in range(1000):
                opened.step(plan(step)).result()


@pytest.mark.parametrize("resources", [None, FAR])
def test_ranks_may_be_ahead_of_the_one_that_samples(cluster, runtime_dir, resources):
    """Between nodes, Ray's receiving side would block, and nothing would get past the answer that nobody takes yet."""
    asked = with_our_modules(config(2, 2, resources=resources))
    group = start_ray_graph(
        new_engine(), asked, runtime_dir=runtime_dir, context=None, worker="graph_edges:make_one_that_lags"
    )
    opened = Executor(group)
    try:
        pending = deque(opened.step(plan(step)) for step in range(3))
        for step in range(3, 12):
            pending.append(opened.step(plan(step)))
            assert pending.popleft().result().token_ids == [step - 3]
    finally:
        opened.close()


def test_a_worker_that_hangs_is_missed_by_the_channels_timeout(cluster, runtime_dir):
    with executor(runtime_dir, ray_graph_timeout=1.0, heartbeat_timeout=60) as (opened, engine):
        opened.call(LoadNullModel(), CacheAllocated, timeout=30)
        os.kill(pid_of(engine, "tp1-pp0"), signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=r"no result within the time that `ray_graph_timeout` allows"):
            opened.step(plan(0)).result()


def test_a_worker_that_hangs_is_missed_by_its_silence(cluster, runtime_dir):
    with executor(runtime_dir, heartbeat_timeout=1.5) as (opened, engine):
        os.kill(pid_of(engine, "tp0-pp0"), signal.SIGSTOP)
        with pytest.raises((WorkerLost, DeadlineExceeded), match="was silent for"):
            opened.call(OpenGroups(), GroupsOpened, timeout=30)


def test_a_worker_that_cannot_be_made_leaves_nothing(cluster, runtime_dir):
    asked = with_our_modules(config(2))
    with pytest.raises(WorkerLost, match="it cannot be made"):
        start_ray_graph(new_engine(), asked, runtime_dir=runtime_dir, context=None, worker="graph_edges:make_none")
    assert ray.is_initialized()


@pytest.mark.parametrize("is_step", [True, False])
def test_one_rank_that_fails_is_heard_while_the_other_waits_for_it(cluster, runtime_dir, is_step):
    asked = with_our_modules(config(2))
    group = start_ray_graph(
        new_engine(), asked, runtime_dir=runtime_dir, context=None, worker="graph_edges:make_one_that_fails"
    )
    opened = Executor(group)
    try:
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match=r"engine-0/tp1-pp0: ZeroDivisionError: there is a bug"):
            if is_step:
                opened.step(plan(0)).result()
            else:
                opened.call(OpenGroups(), GroupsOpened, timeout=30)
        assert time.monotonic() - began < LONG_SECONDS / 2
    finally:
        opened.close()
