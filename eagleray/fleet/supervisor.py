"""The supervisor: turns sockets, exits, heartbeats and timers into events of `FleetState`, and carries out its actions.

Every decision about the fleet is in `fleet/state.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec

from eagleray.config.api_keys import without_api_keys, without_hub_token
from eagleray.config.resolve import local_ranks, served_names
from eagleray.config.sections import Config
from eagleray.errors import ChannelClosed, EagleRayError, EngineFailed
from eagleray.fleet import timeouts
from eagleray.fleet.attach_file import attach_file
from eagleray.fleet.events import (
    Adopt,
    Disconnected,
    Event,
    Exited,
    KillInstance,
    NotConnected,
    Silent,
    StartApiServers,
    StartEngines,
    StopInstance,
    TimePassed,
)
from eagleray.fleet.external_clients import is_external
from eagleray.fleet.host_room import explain_gpu_shortage, explain_memory_shortage
from eagleray.fleet.launcher import ENGINE_MODULES, Launcher, ProcessLauncher, Spawned, has_fork_server
from eagleray.fleet.state import FleetState
from eagleray.fleet.turn import (
    Action,
    Connect,
    Disconnect,
    FailInstance,
    Kill,
    Send,
    Serve,
    Spawn,
    Stopped,
    Terminate,
    ToMember,
)
from eagleray.identity import SUPERVISOR, ClientId, EngineId, MemberId, new_instance_name
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import ApiServerSpec, Attach, EngineSpec, MemberToSupervisor
from eagleray.messages.wires import SUPERVISOR_INBOX, SUPERVISOR_OUTBOX
from eagleray.messages.workers import RayContext
from eagleray.process.fork_server_keeper import ForkServerKeeper
from eagleray.transport.heartbeat import HeartbeatMonitor
from eagleray.transport.inbox import AsyncInbox, Outbox
from eagleray.transport.runtime_dir import make_runtime_dir, remove_dead_sockets, remove_runtime_dir

logger = get_logger(__name__)


class Supervisor:
    """Owns the processes and the connections of the fleet. Make one with `open`, in the event loop that it is to run
    in; `stop` must be called. `exit_stack` is closed when all processes have exited."""

    def __init__(
        self,
        config: Config,
        *,
        instance: str,
        runtime_dir: Path,
        engine_launcher: Launcher[EngineSpec],
        api_server_launcher: Launcher[ApiServerSpec],
        ray: RayContext | None,
        exit_stack: AsyncExitStack,
        fork_server: ForkServerKeeper | None = None,
    ) -> None:
        self.instance = instance
        self.runtime_dir = runtime_dir
        """Directory of the instance's sockets."""
        self.serving = asyncio.Event()
        """Set once every member that was started or adopted at first has started, or was given up, and the clients know
        the engines."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the exception that ends this instance, never a result."""
        self._stopped = asyncio.Event()
        self._config = config
        self._engine_launcher = engine_launcher
        self._api_server_launcher = api_server_launcher
        self._fork_server = fork_server
        self._listener_fd: int | None = None
        self._ray = ray
        self._exit_stack = exit_stack
        self._state = FleetState(config, instance, shortage=self._shortage)
        self._events: deque[Event] = deque()
        """Events that wait for the one that is being handled."""
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._spawned: dict[MemberId, Spawned] = {}
        self._inbox: AsyncInbox[MemberToSupervisor] = AsyncInbox(
            runtime_dir, SUPERVISOR.label, Codec(SUPERVISOR_INBOX).decode, host=self.host
        )
        exit_stack.callback(self._inbox.close)
        self._outbox: Outbox[MemberId, Attach | ToMember] = Outbox(Codec[Attach | ToMember](SUPERVISOR_OUTBOX).encode)
        exit_stack.callback(self._outbox.close)
        self._heartbeat_numbers: dict[MemberId, int] = {}
        self._members: dict[int, MemberId] = {}
        """Members by the number that the heartbeat monitor knows them by."""
        self._heartbeats = HeartbeatMonitor.open(
            runtime_dir=runtime_dir,
            host=self.host,
            limit=config.execution.heartbeat_timeout,
            on_silent=partial(self._call_soon, self._on_silent),
        )
        exit_stack.callback(self._heartbeats.close)
        self._connection_poll = self._loop.call_later(timeouts.CONNECTION_POLL_SECONDS, self._poll_connections)
        self._reader = self._loop.create_task(self._read_inbox(), name="supervisor-inbox")
        exit_stack.push_async_callback(self._stop_reader)

    @classmethod
    async def open(
        cls, config: Config, *, ray: RayContext | None = None, engine_target: str = "eagleray.engine.entry:run"
    ) -> Supervisor:
        """Open a supervisor with a bound inbox.

        `ray` is the context of this program in a Ray cluster, where engines are placed; None outside of one.
        `engine_target` is the `module:function` of engines that are processes. Raises `ConfigError`, or `ClusterError`
        if engines are to be Ray actors and the cluster cannot be reached.
        """
        exit_stack = AsyncExitStack()
        try:
            instance, runtime_dir = new_instance_name(config.execution.instance_name), make_runtime_dir()
            exit_stack.callback(remove_runtime_dir, runtime_dir)
            if config.execution.instance_name is not None:
                logger.info("instance %s", instance)
            fork_server = ForkServerKeeper(ENGINE_MODULES) if has_fork_server(config) else None
            if fork_server is not None:
                exit_stack.callback(fork_server.close)
            processes = ProcessLauncher(
                engine_target=engine_target,
                api_server_target="eagleray.server.entry:run",
                runtime_dir=str(runtime_dir),
                fork_server=fork_server,
            )
            engine_launcher: Launcher[EngineSpec] = processes
            if config.parallel.data_parallel_backend == "ray":
                from eagleray.fleet.ray_launcher import RayLauncher

                engine_launcher = await RayLauncher.open(
                    without_api_keys(config), instance=instance, runtime_dir=runtime_dir, ray=ray
                )
                exit_stack.push_async_callback(engine_launcher.close)
            supervisor = cls(
                config,
                instance=instance,
                runtime_dir=runtime_dir,
                engine_launcher=engine_launcher,
                api_server_launcher=processes,
                ray=ray,
                exit_stack=exit_stack,
                fork_server=fork_server,
            )
            if config.serving.attach_file is not None:
                path, model = Path(config.serving.attach_file).expanduser(), served_names(config.model)[0]
                address = supervisor._inbox.address
                exit_stack.enter_context(attach_file(path, instance=instance, supervisor=address, model=model))
        except BaseException:
            await exit_stack.aclose()
            raise
        return supervisor

    @property
    def host(self) -> str | None:
        """Address at which members on other hosts reach this one; None if all members are on this host."""
        return self._engine_launcher.host

    @property
    def engines(self) -> set[EngineId]:
        """Engines that are present or expected."""
        return self._state.engines

    def start_engines(self) -> None:
        """Start the engines that the configuration wants on this instance."""
        self._handle(StartEngines(tuple(local_ranks(self._config))))

    def start_api_servers(self, listener_fd: int) -> None:
        """Start the API servers. They accept from the socket `listener_fd`, which stays the caller's."""
        self._listener_fd = listener_fd
        self._handle(StartApiServers(tuple(range(self._config.serving.api_server_count))))

    def adopt(self, client: ClientId, address: str) -> None:
        """Attach a client in this process, whose inbox is bound at `address`."""
        self._handle(Adopt(client, address))

    async def stop(self, grace: float) -> None:
        """Stop every process: API servers first, which let running requests finish for `grace` seconds."""
        self._handle(StopInstance(grace))
        try:
            async with asyncio.timeout(self.stop_seconds(grace)):
                await self._stopped.wait()
        except TimeoutError:
            logger.error("processes still run %.0f s after the instance was told to stop", self.stop_seconds(grace))
        await self._exit_stack.aclose()
        if self.failed.done():
            self.failed.exception()  # mark it as retrieved: a caller that stops us need not have read it

    @staticmethod
    def stop_seconds(grace: float) -> float:
        """Return the longest time that `stop` may take."""
        return 2 * (grace + 4 * timeouts.STOP_TIMEOUT_SECONDS)

    def kill(self) -> None:
        """Kill every process at once. `stop` must still be called, and is quick then."""
        self._handle(KillInstance())
        self._engine_launcher.kill()

    # Events

    def _handle(self, event: Event) -> None:
        """Handle an event, and then the events that its actions cause. An exception fails the instance, because the
        state may be half changed."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._carry_out(self._state.handle(self._events.popleft(), self._loop.time()))
        except Exception as error:
            logger.exception("the supervisor failed; the instance ends")
            self._fail(EngineFailed(f"the supervisor failed: {type(error).__name__}: {error}"))
        finally:
            self._is_handling = False
            self._set_timer()

    def _fail(self, error: EngineFailed) -> None:
        if not self.failed.done():
            self._carry_out(self._state.fail(error, self._loop.time()))
            return
        for spawned in self._spawned.values():  # the state cannot be relied on to stop them either
            spawned.kill()
        self._stopped.set()

    def _post(self, event: Event) -> None:
        """Handle an event in the event loop; from any thread."""
        self._call_soon(self._handle, event)

    def _call_soon(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the supervisor has stopped
            self._loop.call_soon_threadsafe(function, *args)

    def _set_timer(self) -> None:
        due = self._state.deadline
        if self._timer is not None:
            if self._timer.when() == due:
                return
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._handle(TimePassed())

    def _on_silent(self, number: int, seconds: float) -> None:
        if (member := self._members.get(number)) is not None:
            self._handle(Silent(member, seconds))

    def _poll_connections(self) -> None:
        self._connection_poll = self._loop.call_later(timeouts.CONNECTION_POLL_SECONDS, self._poll_connections)
        for member in self._outbox.pop_broken():
            self._handle(Disconnected(member))

    async def _read_inbox(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                try:
                    message = await self._inbox.receive()
                except msgspec.MsgspecError as error:  # any process that may enter the directory can write to the inbox
                    logger.warning("dropped a message that is not of the supervisor's wire: %s", error)
                else:
                    self._handle(message)

    async def _stop_reader(self) -> None:
        self._connection_poll.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    # Actions

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(receivers, message):
                    for receiver in receivers:
                        self._outbox.send(receiver, message)
                case Connect():
                    self._connect(action)
                case Disconnect(member, flushes):
                    self._disconnect(member, flushes=flushes)
                case Spawn(member):
                    self._spawn(member)
                case Terminate(member):
                    if spawned := self._spawned.get(member):
                        spawned.terminate()
                case Kill(member):
                    if spawned := self._spawned.get(member):
                        spawned.kill()
                case Serve():
                    self.serving.set()
                    if self._fork_server is not None:
                        self._fork_server.prepare()
                case FailInstance(error):
                    self.failed.set_exception(error)
                case Stopped():
                    self._stopped.set()

    def _spawn(self, member: MemberId) -> None:
        if member.incarnation:
            remove_dead_sockets(self.runtime_dir)  # the incarnation before may have been killed
        try:
            self._spawned[member] = self._spawn_member(member)
        except (OSError, EagleRayError) as error:
            self._handle(Exited(member, Failure.noticed(f"it could not be started: {error}")))

    def _spawn_member(self, member: MemberId) -> Spawned:
        on_exit = partial(self._call_soon, self._on_exit, member)
        if isinstance(member, EngineId):
            runtime_dir = str(self.runtime_dir) if self.host is None else ""  # other hosts do not have it
            engine = EngineSpec(
                member,
                without_api_keys(self._state.engine_config(member)),
                runtime_dir,
                ray=self._ray,
                num_engines=self._state.num_engines,
                expert_group_size=self._state.expert_group_size,
                update=self._state.engine_options(member).update,
            )
            return self._engine_launcher.spawn(engine, on_message=self._post, on_exit=on_exit)
        assert self._listener_fd is not None
        config = without_hub_token(self._config)
        server = ApiServerSpec(member, config, str(self.runtime_dir), self._listener_fd, host=self.host)
        return self._api_server_launcher.spawn(server, on_message=self._post, on_exit=on_exit)

    def _shortage(self, num_added: int) -> str | None:
        """Return why engines that are added find no room; None if they may, or if Ray places them."""
        if self._config.parallel.data_parallel_backend == "ray":
            return None
        ranks = {engine.rank for engine in self._state.engines}
        return explain_gpu_shortage(num_added, ranks, self._config) or explain_memory_shortage(
            num_added, self._state.engine_infos, self._config.cache
        )

    def _on_exit(self, member: MemberId, cause: Failure) -> None:
        self._spawned.pop(member, None)
        self._handle(Exited(member, cause))

    def _connect(self, connect: Connect) -> None:
        member = connect.member
        try:
            self._outbox.connect(member, connect.address)
        except Exception as error:
            if not is_external(member):
                raise
            self._handle(NotConnected(member, str(error)))  # the address comes from outside, so it may be anything
            return
        heartbeat = b""
        if connect.has_heartbeat:
            number, heartbeat = self._heartbeats.invite(within=timeouts.FIRST_HEARTBEAT_TIMEOUT_SECONDS)
            self._heartbeat_numbers[member], self._members[number] = number, member
        attach = msgspec.structs.replace(connect.attach, supervisor=self._inbox.address, heartbeat=heartbeat)
        self._outbox.send(member, attach)

    def _disconnect(self, member: MemberId, *, flushes: bool) -> None:
        if (number := self._heartbeat_numbers.pop(member, None)) is not None:
            self._heartbeats.forget(number)
            del self._members[number]
        if flushes:
            self._outbox.disconnect(member)
        else:
            self._outbox.disconnect(member, linger_ms=0)
