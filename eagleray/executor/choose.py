"""Choice of the worker group of an engine. Only the chosen one is imported, so the others' dependencies cost
nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eagleray.cluster.bundles import count_fitting, subtract_held, worker_resources
from eagleray.config.resolve import engines_on_host, executor_name
from eagleray.config.sections import Config
from eagleray.executor.executor import Executor
from eagleray.executor.group import WorkerGroup
from eagleray.identity import EngineId
from eagleray.messages.workers import RayContext
from eagleray.process.fork_server import ForksChildren


def open_executor(
    engine: EngineId,
    config: Config,
    *,
    runtime_dir: Path,
    ray: RayContext | None = None,
    on_lost: Callable[[Exception], None] | None = None,
    fork_server: ForksChildren | None = None,
) -> Executor:
    """Start the workers that `config` asks for and return their executor. Cleans up and raises if one does not start.

    `ray`: context of this program, if it runs inside a Ray cluster. `on_lost` is called with the cause, from a thread,
    before this process exits because a Ray cluster that it has started is lost. `fork_server`: forks workers that are
    processes.
    """
    return Executor(_open_group(engine, config, runtime_dir, ray, on_lost, fork_server))


def is_in_placement_group(config: Config, ray: RayContext | None) -> bool:
    """Whether workers would go into the placement group that the program `ray` runs in.

    They do not if the program itself holds the resources they need and the group has no room for more: then they run
    as its children, on the resources that it holds.
    """
    if ray is None or ray.placement_group is None:
        return False
    held = {} if ray.caller is None else ray.caller.held
    worker = worker_resources(config.ray.ray_worker_resources, config.execution.device, ray.group_bundles)
    needed = config.parallel.world_size * engines_on_host(config)
    free = sum(
        count_fitting(subtract_held(has, held.get(index, {})), worker) for index, has in enumerate(ray.group_bundles)
    )
    return free >= needed or sum(count_fitting(has, worker) for has in held.values()) < needed


def _open_group(
    engine: EngineId,
    config: Config,
    runtime_dir: Path,
    ray: RayContext | None,
    on_lost: Callable[[Exception], None] | None,
    fork_server: ForksChildren | None,
) -> WorkerGroup:
    name = executor_name(config, in_placement_group=is_in_placement_group(config, ray))
    match name:
        case "in-process":
            from eagleray.executor.in_process import InProcessGroup

            return InProcessGroup(engine, config)
        case "processes":
            from eagleray.executor.processes import start_processes

            return start_processes(engine, config, runtime_dir=runtime_dir, fork_server=fork_server)
        case "ray":
            from eagleray.executor.ray_actors import start_ray_actors

            return start_ray_actors(engine, config, runtime_dir=runtime_dir, context=ray, on_lost=on_lost)
        case "ray-graph":
            from eagleray.executor.ray_graph.group import start_ray_graph

            return start_ray_graph(engine, config, runtime_dir=runtime_dir, context=ray, on_lost=on_lost)
