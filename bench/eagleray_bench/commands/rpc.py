"""`eagleray bench rpc`: cost of a step on its way to the workers and back.

The plan is that of running requests, one token each; the workers' model computes nothing. Measured busy (the next step
right after the last one) and after idleness (all processes asleep).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eagleray.config.build import build_config
from eagleray.executor.choose import open_executor
from eagleray.executor.executor import Executor
from eagleray.identity import EngineId, new_instance_name
from eagleray.messages.codec import Codec
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import Call, CallDone, LoadNullModel, NewRow, StepPlan
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

if TYPE_CHECKING:
    from eagleray_bench.simulated_cluster import SimulatedCluster


EXECUTORS = ("in-process", "processes", "ray", "ray-graph")
IDLE_SECONDS = 1.5
WARM_UP = 200


class RpcFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds per step."""

    executor: str
    workers: int
    place: str
    busy_p50: float
    busy_p99: float
    idle_p50: float
    idle_p99: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executors", nargs="+", choices=EXECUTORS, default=list(EXECUTORS), help="executors to measure (default: all)"
    )
    parser.add_argument(
        "--workers", nargs="+", type=int, default=[1, 2, 4], metavar="N", help="numbers of workers (default: 1 2 4)"
    )
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="running requests (default: 32)")
    parser.add_argument("--steps", type=int, default=3000, metavar="N", help="steps measured busy (default: 3000)")
    parser.add_argument("--idle-steps", type=int, default=10, metavar="N", help="steps measured after idleness")
    parser.add_argument(
        "--remote", action="store_true", help="also with the workers on a second Ray node, simulated on this machine"
    )
    parser.add_argument(
        "--baselines", action="store_true", help="also a bare Ray actor call and a bare compiled graph with equal bytes"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")


def run(arguments: argparse.Namespace) -> None:
    figures: list[RpcFigures] = []
    print(f"{'executor':<22}{'workers':>8}  {'place':<8}{'busy p50':>10}{'p99':>9}{'idle p50':>11}{'p99':>9}   µs")
    for figure in _measure_all(arguments):
        figures.append(figure)
        numbers = f"{figure.busy_p50:>10.0f}{figure.busy_p99:>9.0f}{figure.idle_p50:>11.0f}{figure.idle_p99:>9.0f}"
        print(f"{figure.executor:<22}{figure.workers:>8}  {figure.place:<8}{numbers}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(msgspec.to_builtins(figures), indent=1) + "\n")


def _measure_all(arguments: argparse.Namespace) -> Iterator[RpcFigures]:
    plans = _Plans(arguments.requests)
    with ExitStack() as stack:
        ray = [name for name in arguments.executors if name.startswith("ray")]
        cluster = None
        if ray or arguments.baselines:
            from eagleray_bench.simulated_cluster import open_cluster  # imported here: other executors do not need Ray

            cluster = stack.enter_context(open_cluster(max(arguments.workers), remote=arguments.remote))
        for executor in arguments.executors:
            for workers in arguments.workers if executor != "in-process" else [1]:
                for place, options in _worker_nodes(executor, cluster):
                    with _executor(executor, workers, **options) as opened:
                        opened.call(LoadNullModel(), CallDone, timeout=60)
                        opened.step(plans.first()).result()
                        step = partial(_step, opened, plans)
                        yield _figures(step, arguments, executor=executor, workers=workers, place=place)
        if arguments.baselines and cluster is not None:
            payload = Codec[Call](Call).encode(Call(1, plans.next()))[0]
            for name, call in cluster.baselines(bytes(payload)):
                yield _figures(call, arguments, executor=name, workers=1, place="local")


def _worker_nodes(executor: str, cluster: SimulatedCluster | None) -> list[tuple[str, dict[str, Any]]]:
    """Return the possible nodes of this executor's workers, each with the options that place them there."""
    if cluster is None or not executor.startswith("ray"):
        return [("local", {})]
    return [
        (place, {"ray_address": cluster.address, "ray_worker_resources": {resource: 1}})
        for place, resource in cluster.resources.items()
    ]


class _Plans:
    """Plans of consecutive steps of requests that never finish."""

    def __init__(self, num_requests: int) -> None:
        self._rows = list(range(num_requests))
        self._step = 0

    def first(self) -> StepPlan:
        self._step = 0
        starts = [
            NewRow(
                row=row,
                request_id=str(row),
                token_ids=[1] * 8,
                num_prompt_tokens=8,
                num_computed_tokens=0,
                block_ids=[row],
                sampling=Sampling(seed=0),
            )
            for row in self._rows
        ]
        return StepPlan(
            step=0, freed_rows=[], new_rows=starts, new_blocks=[], rows=self._rows, num_tokens=[8] * len(self._rows)
        )

    def next(self) -> StepPlan:
        self._step += 1
        num_tokens = [1] * len(self._rows)
        return StepPlan(
            step=self._step, freed_rows=[], new_rows=[], new_blocks=[], rows=self._rows, num_tokens=num_tokens
        )


def _step(executor: Executor, plans: _Plans) -> None:
    executor.step(plans.next()).result()


@contextmanager
def _executor(name: str, workers: int, **options: Any) -> Iterator[Executor]:
    config = build_config(executor=name, tensor_parallel_size=workers, num_threads=1, log_level="warning", **options)
    with ExitStack() as stack:
        runtime_dir = make_runtime_dir()
        stack.callback(remove_runtime_dir, runtime_dir)
        opened = open_executor(EngineId(new_instance_name(), 0), config, runtime_dir=runtime_dir)
        stack.callback(opened.close)
        yield opened


def _figures(call: Callable[[], Any], arguments: argparse.Namespace, **of: Any) -> RpcFigures:
    for _ in range(WARM_UP):
        call()
    busy = [_timed(call) for _ in range(arguments.steps)]
    idle = []
    for _ in range(arguments.idle_steps):
        time.sleep(IDLE_SECONDS)
        idle.append(_timed(call))
    busy_p50, busy_p99 = np.percentile(busy, [50, 99]).tolist()
    idle_p50, idle_p99 = np.percentile(idle, [50, 99]).tolist()
    return RpcFigures(busy_p50=busy_p50, busy_p99=busy_p99, idle_p50=idle_p50, idle_p99=idle_p99, **of)


def _timed(call: Callable[[], Any]) -> float:
    """Microseconds per step."""
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1e3
