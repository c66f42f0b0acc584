"""Workers in a compiled graph: results own their memory, and failures have a name."""

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
from graph_handlers import LONG_SECONDS
from ray.exceptions import RayChannelTimeoutError
from ray_cluster import FAR, config, new_engine

from eagleray.cluster.deadline import Deadline
from eagleray.cluster.worker_actors import open_worker_actors
from eagleray.config.sections import Config
from eagleray.errors import DeadlineExceeded, WorkerFailed, WorkerLost
from eagleray.executor.executor import Executor
from eagleray.executor.ray_graph.detach import is_borrowed
from eagleray.executor.ray_graph.graph import Graph, GraphActor, call_actors, to_ray_frames, wait_until_ready
from eagleray.executor.ray_graph.group import start_ray_graph
from eagleray.identity import EngineId
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import CallDone, LoadNullModel, NewRow, OpenGroup, StepPlan
from eagleray.messages.workers import GroupOpened

pytestmark = pytest.mark.grid
"""The usual suite has this executor in `test_ray_agree`."""

HERE = str(Path(__file__).parent)
MAX_STEPS = 4


def with_test_modules(config: Config) -> Config:
    ray_config = msgspec.structs.replace(config.ray, ray_runtime_env={"env_vars": {"PYTHONPATH": HERE}})
    return msgspec.structs.replace(config, ray=ray_config)


@contextmanager
def graph(*, num_actors: int = 1, timeout: float = 20.0, **options: Any) -> Iterator[tuple[Graph, list[Any]]]:
    """Open a graph over actors that echo."""
    deadline = Deadline(60, "startup_timeout")
    workers = open_worker_actors(
        new_engine(),
        with_test_modules(config(num_actors, **options)),
        context=None,
        deadline=deadline,
        kind=GraphActor,
        max_concurrency=2,
    )
    try:
        workers.actors.run("graph_handlers:make", [b""] * num_actors)
        handles = workers.actors.handles
        wait_until_ready(handles, deadline, lambda: None)
        made = Graph(handles, max_steps=MAX_STEPS, timeout=timeout)
        try:
            yield made, handles
        finally:
            made.close()
    finally:
        workers.close()


def test_results_borrowed_memory_that_is_kept_stalls_the_graph(cluster):
    """`detach` exists because a result that is kept blocks the channel when the same buffer is used again."""
    with graph(timeout=5) as (made, _):
        made.results(made.execute([b"x"]))
        held = []
        with pytest.raises(RayChannelTimeoutError):
            for _ in range(3 * MAX_STEPS):
                held.append(made.results(made.execute([b"x"]), copy=lambda results: results))
        assert len(held) <= MAX_STEPS
        assert is_borrowed(held[0][0][1])
        held.clear()


@pytest.mark.parametrize("resources", [None, FAR])
def test_results_detached_memory_may_be_kept(cluster, resources):
    with graph(num_actors=2, timeout=10, resources=resources) as (made, actors):
        held = [made.results(made.execute([b"x", np.arange(step)])) for step in range(5 * MAX_STEPS)]
        for step, results in enumerate(held):
            for header, own, echoed in results:
                assert header == b"x" and not is_borrowed(own) and not is_borrowed(echoed)
                assert np.array_equal(own.view(np.float32), np.full(1000, 2, np.float32))
                assert np.array_equal(echoed.view(np.int64), np.arange(step))
        beside = list(call_actors(actors, [b"y"]))
        assert [answer[0] for answer in beside] == [b"y", b"y"]
        assert made.results(made.execute([b"nothing"])) == [[], []]


def test_to_ray_frames_does_not_copy():
    array = np.arange(5000)
    header, body = to_ray_frames([b"header", array.data.cast("B")])
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


def test_ray_graph_group_alternating_steps_and_calls_are_answered(cluster, runtime_dir):
    with executor(runtime_dir) as (opened, _):
        for _ in range(2):
            opened.call(LoadNullModel(), CallDone, timeout=30)
            pending = [opened.step(plan(step)) for step in range(3)]
            assert [step.result().token_ids for step in pending] == [[0]] * 3


def test_ray_graph_group_worker_that_raises_is_named(cluster, runtime_dir):
    with executor(runtime_dir) as (opened, _):
        opened.call(LoadNullModel(), CallDone, timeout=30)
        with pytest.raises(WorkerFailed, match=r"engine-0/tp[01]-pp0: KeyError: 0"):
            opened.step(plan(1)).result()


@pytest.mark.parametrize("resources", [None, FAR])
def test_ray_graph_group_killed_worker_is_named(cluster, runtime_dir, resources):
    with executor(runtime_dir, resources=resources) as (opened, engine):
        opened.call(LoadNullModel(), CallDone, timeout=30)
        pid = pid_of(engine, "tp1-pp0")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="engine-0/tp1-pp0"):
            for step in range(1000):
                opened.step(plan(step)).result()


@pytest.mark.parametrize("resources", [None, FAR])
def test_ray_graph_group_ranks_may_be_ahead_of_the_one_that_samples(cluster, runtime_dir, resources):
    """Ray's receiver on another node would block, and no message would pass the reply that is not read yet."""
    asked = with_test_modules(config(2, 2, resources=resources))
    group = start_ray_graph(
        new_engine(), asked, runtime_dir=runtime_dir, context=None, worker="graph_handlers:make_one_that_lags"
    )
    opened = Executor(group)
    try:
        pending = deque(opened.step(plan(step)) for step in range(3))
        for step in range(3, 12):
            pending.append(opened.step(plan(step)))
            assert pending.popleft().result().token_ids == [step - 3]
    finally:
        opened.close()


def test_ray_graph_group_hung_worker_is_noticed_by_the_channels_timeout(cluster, runtime_dir):
    with executor(runtime_dir, ray_graph_timeout=1.0, heartbeat_timeout=60) as (opened, engine):
        opened.call(LoadNullModel(), CallDone, timeout=30)
        os.kill(pid_of(engine, "tp1-pp0"), signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=r"no result within the time that `ray_graph_timeout` allows"):
            opened.step(plan(0)).result()


def test_ray_graph_group_hung_worker_is_noticed_by_missing_heartbeats(cluster, runtime_dir):
    with executor(runtime_dir, heartbeat_timeout=1.5) as (opened, engine):
        os.kill(pid_of(engine, "tp0-pp0"), signal.SIGSTOP)
        with pytest.raises((WorkerLost, DeadlineExceeded), match="was silent for"):
            opened.call(OpenGroup("engine"), GroupOpened, timeout=30)


def test_start_ray_graph_worker_that_cannot_be_created_leaves_nothing(cluster, runtime_dir):
    asked = with_test_modules(config(2))
    with pytest.raises(WorkerFailed, match="it cannot be made"):
        start_ray_graph(new_engine(), asked, runtime_dir=runtime_dir, context=None, worker="graph_handlers:make_none")
    assert ray.is_initialized()


@pytest.mark.parametrize("is_step", [True, False])
def test_ray_graph_group_failed_rank_is_reported_while_the_other_waits_for_it(cluster, runtime_dir, is_step):
    asked = with_test_modules(config(2))
    group = start_ray_graph(
        new_engine(), asked, runtime_dir=runtime_dir, context=None, worker="graph_handlers:make_one_that_fails"
    )
    opened = Executor(group)
    try:
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match=r"engine-0/tp1-pp0: ZeroDivisionError: there is a bug"):
            if is_step:
                opened.step(plan(0)).result()
            else:
                opened.call(OpenGroup("engine"), GroupOpened, timeout=30)
        assert time.monotonic() - began < LONG_SECONDS / 2
    finally:
        opened.close()
