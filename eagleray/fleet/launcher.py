"""What the supervisor knows of something that it has spawned, and who spawns it: processes of this host, here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from eagleray.log import get_logger
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import ApiServerSpec, ChildToParent, EngineSpec
from eagleray.process.spawn import Child

logger = get_logger(__name__)

Spec = TypeVar("Spec", contravariant=True)

OnMessage = Callable[[ChildToParent], None]
"""Called with each message, in order, from any thread."""

OnExit = Callable[[Failure], None]
"""Called exactly once, after the last message, from any thread, with the reason of the exit."""


class Spawned(Protocol):
    """A process, or an actor. `process.Child` is one."""

    label: str

    def terminate(self) -> None:
        """Ask it to end. Harmless when it has ended."""

    def kill(self) -> None:
        """End it, even if it is stopped. Harmless when it has ended."""


class Launcher(Protocol[Spec]):
    """Spawns engines, or API servers."""

    @property
    def host(self) -> str | None:
        """Address of this host for what is spawned elsewhere; None if everything is on this host."""

    def spawn(self, spec: Spec, *, on_message: OnMessage, on_exit: OnExit) -> Spawned:
        """Does not wait. Raises `OSError` or `EagleRayError`; then neither is called."""

    async def close(self) -> None:
        """When everything that it has spawned has ended."""

    def kill(self) -> None:
        """End everything at once."""


class ProcessLauncher:
    """Spawns engines and API servers as processes of this host. Targets are `module:function`."""

    host = None

    def __init__(self, *, engine_target: str, api_server_target: str, runtime_dir: str, log_level: str) -> None:
        self._engine_target = engine_target
        self._api_server_target = api_server_target
        self._runtime_dir = runtime_dir
        self._log_level = log_level

    def spawn(self, spec: EngineSpec | ApiServerSpec, *, on_message: OnMessage, on_exit: OnExit) -> Child:
        match spec:
            case EngineSpec(engine=member):
                target, descriptors = self._engine_target, []
            case ApiServerSpec(client=member, listener_fd=listener_fd):
                target, descriptors = self._api_server_target, [listener_fd]
        child = Child(
            target=target,
            member=member,
            payload=msgspec.msgpack.encode(spec),
            log_level=self._log_level,
            runtime_dir=self._runtime_dir,
            on_message=on_message,
            on_exit=on_exit,
            pass_fds=descriptors,
        )
        logger.debug("%s is process %d", member.label, child.pid)
        return child

    async def close(self) -> None:
        """Nothing is left of processes that have ended."""

    def kill(self) -> None:
        """Its processes are killed one by one."""
