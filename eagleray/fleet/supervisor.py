"""The supervisor: starts processes, watches them, tells every member who else is there, and ends them.

Every process takes one path: spawned, it binds its inbox and reports `Bound`; it is sent `Attach`; it reports that it
has started; everybody is told `Joined`; when it ends, everybody is told `Left`. A client that lives in this very
process (`LLM`) is adopted with its address and takes the same path from there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from eagleray import errors
from eagleray.config import Config
from eagleray.errors import ChannelClosed, DeadlineExceeded, EagleRayError, EngineFailed, UserError
from eagleray.fleet.membership import Membership
from eagleray.identity import ClientId, EngineId, PeerId, new_instance_name
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import (
    ApiServerSpec,
    Attach,
    Bound,
    ChildToParent,
    ClientStarted,
    EngineSpec,
    EngineStarted,
    Failed,
    MemberToSupervisor,
    Stop,
    SupervisorToMember,
)
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.wires import SUPERVISOR_INBOX, SUPERVISOR_OUTBOX
from eagleray.messages.workers import RayContext
from eagleray.process import Child
from eagleray.transport import AsyncInbox, Outbox, make_runtime_dir, remove_runtime_dir

__all__ = ["Supervisor"]

logger = get_logger(__name__)

START_MARGIN_SECONDS = 15.0
"""Beyond `startup_timeout`, by which a process ends its own waits, and says what it has waited for."""

END_SECONDS = 15.0
"""How long a process may take to end after `Stop`, and again after SIGTERM, before the next stronger means. An engine
has workers to end first."""


@dataclass
class _Process:
    """A process that was spawned and not yet reaped."""

    child: Child
    failure: Failure | None = None
    """What it said of its end, if it could."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Owns the processes and the membership. Lives in the event loop that it is made in; `stop` must be called.

    `ray`: where this program is in a Ray cluster, if it is in one; engines go there too.
    """

    def __init__(self, config: Config, *, ray: RayContext | None = None) -> None:
        self.instance = new_instance_name()
        self._config = config
        self._ray = ray
        self._loop = asyncio.get_running_loop()
        self._runtime_dir = make_runtime_dir()
        self._inbox: AsyncInbox[MemberToSupervisor] = AsyncInbox(
            self._runtime_dir, "supervisor", Codec(SUPERVISOR_INBOX).decode
        )
        self._outbox: Outbox[PeerId, SupervisorToMember] = Outbox(Codec[SupervisorToMember](SUPERVISOR_OUTBOX).encode)
        self._membership = Membership()
        self._addresses: dict[PeerId, str] = {}
        self._processes: dict[PeerId, _Process] = {}
        self._starting: dict[PeerId, asyncio.TimerHandle] = {}
        self._stopping = False
        self.serving = asyncio.Event()
        """Set while nothing that was spawned or adopted is still starting."""
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the exception that ends this instance, never a result."""
        self._reader = self._loop.create_task(self._read_inbox(), name="supervisor-inbox")

    @property
    def runtime_dir(self) -> Path:
        """Where the sockets of this instance are."""
        return self._runtime_dir

    def spawn_engine(self) -> EngineId:
        """Start the engine."""
        engine = EngineId(self.instance, rank=0)
        spec = EngineSpec(engine, self._config, str(self._runtime_dir), self._ray)
        self._spawn(engine, "eagleray.engine.entry:run", spec)
        return engine

    def spawn_api_server(self, listener_fd: int) -> ClientId:
        """Start an API server that accepts connections from the listening socket `listener_fd`, which stays ours."""
        client = ClientId(self.instance, index=0)
        spec = ApiServerSpec(client, self._config, str(self._runtime_dir), listener_fd)
        self._spawn(client, "eagleray.server.entry:run", spec, pass_fds=[listener_fd])
        return client

    def adopt(self, client: ClientId, address: str) -> None:
        """A client in this process, whose inbox is bound at `address`, belongs to the fleet."""
        self._expect_start(client)
        self._attach(client, address)

    async def stop(self, grace: float) -> None:
        """End every process: API servers first, which let running requests finish for `grace` seconds."""
        self._stopping = True
        await self._end(lambda member: isinstance(member, ClientId), grace)
        await self._end(lambda member: True, 0.0)
        for timer in self._starting.values():  # of adopted clients
            timer.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._inbox.close()
        self._outbox.close()
        if self.failed.done():
            self.failed.exception()  # whoever stops us has seen it or does not care
        remove_runtime_dir(self._runtime_dir)

    @staticmethod
    def stop_seconds(grace: float) -> float:
        """The longest that `stop` may take."""
        return 2 * (grace + 4 * END_SECONDS)

    def kill(self) -> None:
        """End every process at once. `stop` is still needed, and quick then."""
        for process in self._processes.values():
            process.child.kill()

    def _spawn(
        self, member: PeerId, target: str, spec: EngineSpec | ApiServerSpec, *, pass_fds: Sequence[int] = ()
    ) -> None:
        self._expect_start(member)
        child = Child(
            target=target,
            label=member.label,
            payload=msgspec.msgpack.encode(spec),
            log_level=self._config.execution.log_level,
            runtime_dir=str(self._runtime_dir),
            on_message=lambda message: self._from_thread(self._heard, member, message),
            on_exit=lambda reason: self._from_thread(self._exited, member, reason),
            pass_fds=pass_fds,
        )
        self._processes[member] = _Process(child)
        logger.debug("%s is process %d", member.label, child.pid)

    def _from_thread(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            self._loop.call_soon_threadsafe(function, *args)

    def _expect_start(self, member: PeerId) -> None:
        seconds = self._config.execution.startup_timeout + START_MARGIN_SECONDS
        self._starting[member] = self._loop.call_later(seconds, self._start_is_late, member, seconds)
        self.serving.clear()

    def _start_is_late(self, member: PeerId, seconds: float) -> None:
        self._fail(DeadlineExceeded(f"{member.label} had not started after {seconds:.0f} s (option `startup_timeout`)"))

    def _heard(self, member: PeerId, message: ChildToParent) -> None:
        match message:
            case Bound(address):
                self._attach(member, address)
            case Failed(cause):
                self._processes[member].failure = cause
                self._lost(member, cause, str(cause))  # its end may take a while: everybody shall know now

    def _attach(self, member: PeerId, address: str) -> None:
        self._addresses[member] = address
        self._outbox.connect(member, address)
        self._outbox.send(member, Attach(self._inbox.address, self._membership.attach(member)))

    async def _read_inbox(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                match await self._inbox.receive():
                    case EngineStarted(engine, info):
                        self._started(engine, info)
                    case ClientStarted(client):
                        self._started(client, None)

    def _started(self, member: PeerId, info: EngineInfo | None) -> None:
        timer = self._starting.pop(member, None)
        if timer is None:  # its end was heard before its start
            return
        timer.cancel()
        joined = Joined(member, self._addresses[member], info)
        self._tell(self._membership.join(joined), joined)
        if not self._starting:
            self.serving.set()

    def _exited(self, member: PeerId, reason: str) -> None:
        process = self._processes.pop(member)
        process.ended.set()
        self._outbox.disconnect(member)
        if process.failure is None:
            self._lost(member, None, reason)

    def _lost(self, member: PeerId, failure: Failure | None, reason: str) -> None:
        if timer := self._starting.pop(member, None):
            timer.cancel()
        left = Left(member, reason)
        self._tell(self._membership.leave(left), left)
        if not self._stopping:
            self._fail(_as_exception(member, failure, reason))

    def _tell(self, members: Iterable[PeerId], message: Joined | Left) -> None:
        for member in members:
            self._outbox.send(member, message)

    def _fail(self, error: EagleRayError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _end(self, which: Callable[[PeerId], bool], grace: float) -> None:
        """`Stop`, then SIGTERM, then SIGKILL, each when the one before has not helped in time."""
        processes = {member: process for member, process in self._processes.items() if which(member)}
        for member, process in processes.items():
            if timer := self._starting.pop(member, None):  # not listening yet
                timer.cancel()
                process.child.terminate()
            else:
                self._outbox.send(member, Stop(grace))
        means: list[tuple[float, Callable[[Child], None]]] = [
            (grace + END_SECONDS, Child.terminate),
            (END_SECONDS, Child.kill),
        ]
        for patience, stronger in means:
            await _wait_for_end(processes.values(), patience)
            for member, process in processes.items():
                if not process.ended.is_set():
                    logger.warning("%s did not end within %.0f s: %s", member.label, patience, stronger.__name__)
                    stronger(process.child)
        await _wait_for_end(processes.values(), END_SECONDS)


async def _wait_for_end(processes: Iterable[_Process], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for process in processes:
                await process.ended.wait()


def _as_exception(member: PeerId, failure: Failure | None, reason: str) -> EagleRayError:
    """What the end of `member` means to whoever waits for this instance."""
    if failure is None:
        return EngineFailed(f"{member.label} is gone: {reason}")
    if failure.is_user_error:
        error: EagleRayError = getattr(errors, failure.kind, UserError)(failure.message)
        return error
    return EngineFailed(f"{member.label} failed: {failure}\n{failure.traceback}".rstrip())
