"""The supervisor: starts engines and API servers, watches them, publishes the membership, replaces members that exit or
fall silent, and stops all of them.

Every process takes one path, at the first start and at every other. It is spawned, binds its inbox and reports `Bound`;
it is sent `Attach`; it reports that it has started; `Joined` is published; when it exits, `Left` is published, and
`restart_policy` decides whether and when `Replica` starts a replacement. A client in the supervisor's own process
(`LLM`) is adopted with its address, an external one registers with its own; both take the path from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec

from eagleray.config.api_keys import without_api_keys, without_hub_token
from eagleray.config.log_config import log_settings
from eagleray.config.resolve import expert_engines, local_ranks, served_names
from eagleray.config.sections import Config
from eagleray.errors import ChannelClosed, EagleRayError, EngineFailed
from eagleray.fleet import timeouts
from eagleray.fleet.attach_file import attach_file
from eagleray.fleet.connection_monitor import ConnectionMonitor
from eagleray.fleet.control.plane import ControlPlane
from eagleray.fleet.expert_rendezvous import ExpertRendezvous
from eagleray.fleet.external_clients import ExternalClients
from eagleray.fleet.launcher import Launcher, OnExit, OnMessage, ProcessLauncher, Spawned
from eagleray.fleet.membership import MembershipPublisher
from eagleray.fleet.process_exit import ProcessExit
from eagleray.fleet.replica import Replica, ReplicaPhase
from eagleray.fleet.restart_policy import EndInstance, GiveUp, RestartDecision, RestartHistory, decide_restart
from eagleray.identity import SUPERVISOR, ClientId, EngineId, MemberId, new_instance_name, replica_key
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.control import CommandDone, ControlCall
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import (
    Alive,
    ApiServerSpec,
    ClientStarted,
    EngineSpec,
    EngineStarted,
    ExpertsFormed,
    ExpertsOpened,
    Knows,
    MemberToSupervisor,
    Register,
    Stop,
    Unreachable,
)
from eagleray.messages.membership import EngineInfo, Left
from eagleray.messages.wires import SUPERVISOR_INBOX
from eagleray.messages.workers import RayContext
from eagleray.transport.inbox import AsyncInbox
from eagleray.transport.runtime_dir import make_runtime_dir, remove_dead_sockets, remove_runtime_dir

logger = get_logger(__name__)


class Supervisor:
    """Owns the processes and the membership. Make one with `open`, in the event loop that it is to run in; `stop` must
    be called. `exit_stack` is closed when all processes have exited."""

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
        self._config = config
        self._engine_launcher = engine_launcher
        self._api_server_launcher = api_server_launcher
        self._ray = ray
        self._exit_stack = exit_stack
        self._replicas: dict[MemberId, Replica] = {}
        """Replicas by replica key."""
        self._adopted: set[ClientId] = set()
        """Clients in this process."""
        self._known: set[tuple[ClientId, EngineId]] = set()
        """Pairs of a client and an engine of which it has received `Joined`; empty once `serving` is set."""
        self._is_stopping = False
        self._inbox: AsyncInbox[MemberToSupervisor] = AsyncInbox(
            runtime_dir, SUPERVISOR.label, Codec(SUPERVISOR_INBOX).decode, host=self.host
        )
        exit_stack.callback(self._inbox.close)
        self._publisher = MembershipPublisher(
            supervisor=self._inbox.address,
            runtime_dir=runtime_dir,
            host=self.host,
            heartbeat_timeout=config.execution.heartbeat_timeout,
            on_silent=partial(self._post, self._on_silent),
        )
        exit_stack.callback(self._publisher.close)
        self._control = ControlPlane(
            config,
            instance,
            self._publisher,
            join=self._join,
            replace=self._replace,
            guarded=self._guarded,
        )
        exit_stack.callback(self._control.close)
        self._external_clients = ExternalClients(instance, self._publisher)
        self._connections = ConnectionMonitor(
            self._publisher, self._external_clients, replace=partial(self._guarded, self._replace)
        )
        exit_stack.callback(self._connections.close)
        self._rendezvous = ExpertRendezvous(local_ranks(config)) if expert_engines(config) > 1 else None
        """None if engines do not share experts."""
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
            processes = ProcessLauncher(
                engine_target=engine_target,
                api_server_target="eagleray.server.entry:run",
                runtime_dir=str(runtime_dir),
                log=log_settings(config),
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
        expected = (replica.expected for replica in self._replicas.values())
        return {engine for engine in expected if isinstance(engine, EngineId)}

    def start_engines(self) -> None:
        """Start the engines that the configuration wants on this instance."""
        for rank in local_ranks(self._config):
            self._add_replica(EngineId(self.instance, rank), self._spawn_engine)

    def start_api_servers(self, listener_fd: int) -> None:
        """Start the API servers. They accept from the socket `listener_fd`, which stays the caller's."""
        for index in range(self._config.serving.api_server_count):
            self._add_replica(ClientId(self.instance, index), partial(self._spawn_api_server, listener_fd))

    def adopt(self, client: ClientId, address: str) -> None:
        """Attach a client in this process, whose inbox is bound at `address`."""
        self._adopted.add(client)
        self._control.attach(client)
        self._publisher.attach(client, address, has_heartbeat=False)

    async def stop(self, grace: float) -> None:
        """Stop every process: API servers first, which let running requests finish for `grace` seconds."""
        self._close_replicas()
        stop = Stop(grace, cause=str(self.failed.exception()) if self.failed.done() else "")
        await asyncio.gather(self._stop_replicas(ClientId, stop), self._external_clients.stop(stop))
        await self._stop_replicas(EngineId, Stop(0.0, cause=stop.cause))
        await self._exit_stack.aclose()
        if self.failed.done():
            self.failed.exception()  # mark it as retrieved: a caller that stops us need not have read it

    @staticmethod
    def stop_seconds(grace: float) -> float:
        """Return the longest time that `stop` may take."""
        return 2 * (grace + 4 * timeouts.STOP_TIMEOUT_SECONDS)

    def kill(self) -> None:
        """Kill every process at once. `stop` must still be called, and is quick then."""
        self._close_replicas()
        for replica in self._replicas.values():
            replica.kill()
        self._external_clients.close()
        self._engine_launcher.kill()

    # Replicas

    def _add_replica(self, first: MemberId, spawn: Callable[[MemberId, OnMessage, OnExit], Spawned]) -> None:
        execution, ray = self._config.execution, self._config.ray
        # An actor waits for its placement before it starts.
        is_actor = isinstance(first, EngineId) and self._config.parallel.data_parallel_backend == "ray"
        placement_seconds = ray.ray_placement_timeout if is_actor else 0.0
        replica = Replica(
            first,
            spawn=spawn,
            decide=partial(self._decide_restart, first),
            on_bound=self._on_bound,
            on_failed=self._on_failed,
            post=self._post,
            start_seconds=execution.startup_timeout + placement_seconds + timeouts.START_MARGIN_SECONDS,
        )
        self._replicas[replica_key(first)] = replica
        replica.start()

    def _spawn_engine(self, engine: MemberId, on_message: OnMessage, on_exit: OnExit) -> Spawned:
        assert isinstance(engine, EngineId)
        self._prepare_spawn(engine)
        runtime_dir = str(self.runtime_dir) if self.host is None else ""  # other hosts do not have it
        spec = EngineSpec(engine, without_api_keys(self._config), runtime_dir, ray=self._ray)
        return self._engine_launcher.spawn(spec, on_message=on_message, on_exit=on_exit)

    def _spawn_api_server(self, listener_fd: int, client: MemberId, on_message: OnMessage, on_exit: OnExit) -> Spawned:
        assert isinstance(client, ClientId)
        self._prepare_spawn(client)
        spec = ApiServerSpec(
            client, without_hub_token(self._config), str(self.runtime_dir), listener_fd, host=self.host
        )
        return self._api_server_launcher.spawn(spec, on_message=on_message, on_exit=on_exit)

    def _prepare_spawn(self, member: MemberId) -> None:
        self._publisher.expect(member)
        if member.incarnation:
            remove_dead_sockets(self.runtime_dir)  # the incarnation before may have been killed

    def _decide_restart(
        self, member: MemberId, history: RestartHistory, uptime: float | None, cause: Failure
    ) -> tuple[RestartHistory, RestartDecision]:
        is_engine, max_restarts = isinstance(member, EngineId), self._config.recovery.max_engine_restarts
        return decide_restart(
            history,
            uptime=uptime,
            cause=cause,
            max_restarts=max_restarts if is_engine or max_restarts == 0 else None,
            max_delay=timeouts.MAX_ENGINE_DELAY_SECONDS if is_engine else timeouts.MAX_API_SERVER_DELAY_SECONDS,
            instance_has_served=self.serving.is_set(),
        )

    def _on_bound(self, member: MemberId, address: str) -> None:
        self._control.attach(member)
        self._publisher.attach(member, address, has_heartbeat=True)
        if isinstance(member, EngineId):
            self._send_rendezvous()

    def _on_failed(self, ended: ProcessExit) -> None:
        left = Left(ended.member, str(ended.cause), returns=ended.is_replaced)
        self._publisher.leave(left)
        self._control.leave(left)
        if ended.decision is None:
            return
        logger.warning("%s is gone: %s; %s", ended.member.label, ended.cause, ended.next_step)
        if ended.cause.traceback:
            logger.warning("%s", ended.cause.traceback.rstrip())
        if self._ends_instance(ended):
            self._fail_instance(ended.as_exception())
            return
        if self._rendezvous is not None and isinstance(ended.member, EngineId):
            self._rendezvous.remove(ended.member)
            self._send_rendezvous()
        self._check_serving()

    def _ends_instance(self, ended: ProcessExit) -> bool:
        """Whether the instance cannot serve without the member: the last of its kind, or an engine that shares experts
        with the others."""
        if isinstance(ended.decision, GiveUp):
            is_needed = self._rendezvous is not None and isinstance(ended.member, EngineId)
            expected = (replica.expected for replica in self._replicas.values())
            return is_needed or not any(type(member) is type(ended.member) for member in expected)
        return isinstance(ended.decision, EndInstance)

    def _replica_of(self, member: MemberId) -> Replica | None:
        """Return the member's replica; None for members without one, and for past incarnations."""
        replica = self._replicas.get(replica_key(member))
        return replica if replica is not None and replica.member == member else None

    def _on_silent(self, member: MemberId, seconds: float) -> None:
        self._replace(member, f"it was silent for {seconds:.0f} s")

    def _replace(self, member: MemberId, reason: str) -> None:
        if replica := self._replica_of(member):
            replica.fail(Failure.noticed(reason), kill_now=True)

    def _close_replicas(self) -> None:
        self._is_stopping = True
        self._connections.close()
        for replica in self._replicas.values():
            replica.close()

    async def _stop_replicas(self, kind: type[EngineId] | type[ClientId], stop: Stop) -> None:
        replicas = [replica for replica in self._replicas.values() if isinstance(replica.member, kind)]
        await asyncio.gather(
            *(
                replica.stop(partial(self._publisher.send_stop, [replica.member], stop), stop.grace)
                for replica in replicas
            )
        )

    # Messages of members

    async def _read_inbox(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                try:
                    message = await self._inbox.receive()
                except msgspec.MsgspecError as error:  # any process that may enter the directory can write to the inbox
                    logger.warning("dropped a message that is not of the supervisor's wire: %s", error)
                else:
                    self._guarded(self._handle, message)

    async def _stop_reader(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def _handle(self, message: MemberToSupervisor) -> None:
        match message:
            case EngineStarted(engine):
                if self._set_up(engine):
                    self._control.start(message)
            case ClientStarted(client):
                if self._set_up(client):
                    self._join(client, None)
            case ControlCall() | CommandDone():
                self._control.handle(message)
            case Knows(client, engine):
                if not self.serving.is_set():
                    self._known.add((client, engine))
                    self._check_serving()
            case Unreachable(sender, receiver):
                self._connections.on_broken(sender, receiver)
            case ExpertsOpened():
                self._on_experts_opened(message)
            case Ended(EngineId() | ClientId() as member, cause):
                if replica := self._replica_of(member):
                    replica.fail(cause)
            case Register():
                if not self._is_stopping:
                    self._external_clients.register(message)
            case Alive(ClientId() as client):
                self._external_clients.renew(client)
            case Ended() | Alive():
                pass  # workers report to their engines, and engines send heartbeats

    def _set_up(self, member: MemberId) -> bool:
        """Record that a member has started. Returns False if it has left, or had started already."""
        if member not in self._publisher:  # it has left, or was never attached
            return False
        if replica := self._replica_of(member):
            if replica.phase is not ReplicaPhase.STARTING:  # a repeated message
                return False
            replica.set_up()
        return True

    def _join(self, member: MemberId, info: EngineInfo | None) -> None:
        replica = self._replica_of(member)
        if replica is not None and (seconds_away := replica.end_downtime()) is not None:
            logger.info("%s serves again after %.1f s", member.label, seconds_away)
        elif info is not None:
            logger.info("%s has joined", member.label)
        self._publisher.join(member, info)
        self._check_serving()

    def _check_serving(self) -> None:
        replicas = self._replicas.values()
        up = {replica.member for replica in replicas if replica.phase is ReplicaPhase.UP}
        engines = {member for member in up if isinstance(member, EngineId)}
        clients = {member for member in up if isinstance(member, ClientId)} | self._adopted
        all_settled = all(replica.phase is ReplicaPhase.UP or replica.expected is None for replica in replicas)
        if all_settled and self._known.issuperset(itertools.product(clients, engines)):
            self.serving.set()
            self._known.clear()

    # The expert group

    def _on_experts_opened(self, message: ExpertsOpened) -> None:
        engine, replica = message.engine, self._replica_of(message.engine)
        if self._rendezvous is None or replica is None or engine not in self._publisher:
            return
        replica.wait_for_others()
        if self._rendezvous.open(engine, message.epoch, message.opened):
            self._send_rendezvous()

    def _send_rendezvous(self) -> None:
        """Send the state of the rendezvous to the engines: the ranks that it waits for, or the complete group."""
        if (group := self._rendezvous) is None:
            return
        if group.is_complete:
            engines = [self._publisher.joined_message(engine) for engine in group.engines]
            self._publisher.send_to_engines(ExpertsFormed(group.epoch, engines, group.members))
        else:
            self._publisher.send_to_engines(group.open_message)

    # Failure of the instance

    def _post(self, function: Callable[..., None], *args: object) -> None:
        """Call the function in the event loop; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the supervisor has stopped
            self._loop.call_soon_threadsafe(self._guarded, function, *args)

    def _guarded(self, function: Callable[..., None], *args: object) -> None:
        """Call the function. An exception fails the instance, because the state may be half changed."""
        try:
            function(*args)
        except Exception as error:
            logger.exception("the supervisor failed; the instance ends")
            self._fail_instance(EngineFailed(f"the supervisor failed: {type(error).__name__}: {error}"))

    def _fail_instance(self, error: EagleRayError) -> None:
        """Restart nothing from now on, and send the cause to the clients."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self._close_replicas()
            stop = Stop(timeouts.FLUSH_SECONDS, cause=str(error))
            self._publisher.send_stop(self._publisher.clients, stop)
