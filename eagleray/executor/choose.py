"""Which worker group an engine gets. Imports one of them: the others' dependencies are not paid for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eagleray.cluster.bundles import count_fitting, subtract_held, worker_resources
from eagleray.config.resolve import engines_on_host, executor_name, is_asynchronous
from eagleray.config.sections import Config
from eagleray.executor.executor import Executor
from eagleray.executor.group import WorkerGroup
from eagleray.identity import EngineId
from eagleray.messages.workers import RayContext


def open_executor(
    engine: EngineId,
    config: Config,
    *,
    runtime_dir: Path,
    ray: RayContext | None = None,
    on_lost: Callable[[Exception], None] | None = None,
) -> Executor:
    """The executor that `config` asks for, its workers running. Raises, and leaves nothing behind, if one does not.

    `ray`: what this program is in, if it runs inside a Ray cluster. `on_lost`: called with the cause, from a thread,
    before this process ends because a Ray cluster that it has started is lost.
    """
    return Executor(_open_group(engine, config, runtime_dir, ray, on_lost))


def is_in_placement_group(config: Config, ray: RayContext | None) -> bool:
    """Whether workers would go into the placement group that the program `ray` runs in.

    They would not if the program holds what they need itself and the group has no room beside that: then they use what
    the program holds, as its children.
    """
    if ray is None or ray.placement_group is None:
        return False
    held = {} if ray.caller is None else ray.caller.held
    worker = worker_resources(config.ray.ray_worker_resources, config.execution.device, ray.group_bundles)
    needed = config.parallel.world_size * engines_on_host(config)
    beside = sum(
        count_fitting(subtract_held(has, held.get(index, {})), worker) for index, has in enumerate(ray.group_bundles)
    )
    return beside >= needed or sum(count_fitting(has, worker) for has in held.values()) < needed


def _open_group(
    engine: EngineId,
    config: Config,
    runtime_dir: Path,
    ray: RayContext | None,
    on_lost: Callable[[Exception], None] | None,
) -> WorkerGroup:
    name = executor_name(config, in_placement_group=is_in_placement_group(config, ray))
    match name:
        case "in-process":
            from eagleray.executor.in_process import InProcessGroup, ThreadGroup

            return (ThreadGroup if is_asynchronous(config, name) else InProcessGroup)(engine, config)
        case "processes":
            from eagleray.executor.processes import start_processes

            return start_processes(engine, config, runtime_dir=runtime_dir)
        case "ray":
            from eagleray.executor.ray_actors import start_ray_actors

            return start_ray_actors(engine, config, runtime_dir=runtime_dir, context=ray, on_lost=on_lost)
        case "ray-graph":
            from eagleray.executor.ray_graph.group import start_ray_graph

            return start_ray_graph(engine, config, runtime_dir=runtime_dir, context=ray, on_lost=on_lost)
