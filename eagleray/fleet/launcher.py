"""Launchers spawn engines and API servers; here as processes of this host, in `ray_launcher` as Ray actors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from eagleray.config.log_config import log_settings
from eagleray.config.resolve import executor_name
from eagleray.config.sections import Config
from eagleray.log import get_logger
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import ApiServerSpec, ChildToParent, EngineSpec, NodeDraining
from eagleray.process.fork_server import ForksChildren
from eagleray.process.host_gpus import num_visible_gpus
from eagleray.process.spawn import Child

logger = get_logger(__name__)

Spec = TypeVar("Spec", contravariant=True)

OnMessage = Callable[[ChildToParent | NodeDraining], None]
"""Called with each message, in order, from any thread."""

OnExit = Callable[[Failure], None]
"""Called exactly once, after the last message, from any thread, with the cause of the exit."""


class Spawned(Protocol):
    """A process or an actor. `process.spawn.Child` is one."""

    def terminate(self) -> None:
        """Ask it to exit. Harmless after the exit."""

    def kill(self) -> None:
        """Kill it, even if it is stopped. Harmless after the exit."""


class Launcher(Protocol[Spec]):
    @property
    def host(self) -> str | None:
        """Address of this host for processes on other hosts; None if it spawns on this host only."""

    def spawn(self, spec: Spec, *, on_message: OnMessage, on_exit: OnExit) -> Spawned:
        """Spawn without waiting. Raises `OSError` or `EagleRayError`, and then calls neither callback."""

    async def close(self) -> None:
        """Close the launcher, after everything that it spawned has exited."""

    def kill(self) -> None:
        """Kill everything that it spawned, where that is faster than one by one."""


FORKED_EXECUTORS = ("in-process", "processes")
"""Executors whose engines spend most of their start on imports of their own or of their workers."""

ENGINE_MODULES = ("eagleray.engine.entry", "eagleray.executor.in_process", "eagleray.executor.processes")
"""Modules that a fork server imports: those of engines and workers on a CPU, with torch."""


def has_fork_server(config: Config) -> bool:
    """Whether engines that are processes of this host may be forks."""
    return (
        config.execution.worker_multiprocessing_method == "forkserver"
        and sys.platform == "linux"
        and config.parallel.data_parallel_backend != "ray"
        and executor_name(config, in_placement_group=False) in FORKED_EXECUTORS
        and (config.execution.device == "cpu" or num_visible_gpus() == 0)
    )


class ProcessLauncher:
    """Spawns engines and API servers as processes of this host. Targets are `module:function`. Engines are forks of
    `fork_server`, if there is one and it is ready."""

    host = None

    def __init__(
        self,
        *,
        engine_target: str,
        api_server_target: str,
        runtime_dir: str,
        fork_server: ForksChildren | None = None,
    ) -> None:
        self._fork_server = fork_server
        self._engine_target = engine_target
        self._api_server_target = api_server_target
        self._runtime_dir = runtime_dir

    def spawn(self, spec: EngineSpec | ApiServerSpec, *, on_message: OnMessage, on_exit: OnExit) -> Child:
        fork_server, has_workers = None, False
        match spec:
            case EngineSpec(engine=member):
                target, descriptors = self._engine_target, []
                fork_server = self._fork_server
                has_workers = executor_name(spec.config, in_placement_group=False) == "processes"
            case ApiServerSpec(client=member, listener_fd=listener_fd):
                target, descriptors = self._api_server_target, [listener_fd]
        child = Child(
            target=target,
            member=member,
            payload=msgspec.msgpack.encode(spec),
            log=log_settings(spec.config),
            runtime_dir=self._runtime_dir,
            on_message=on_message,
            on_exit=on_exit,
            pass_fds=descriptors,
            fork_server=fork_server,
            has_children=has_workers,
        )
        logger.debug("%s is process %d", member.label, child.pid)
        return child

    async def close(self) -> None:
        """Do nothing: processes that have exited leave nothing behind."""

    def kill(self) -> None:
        """Do nothing: the supervisor kills processes one by one."""
