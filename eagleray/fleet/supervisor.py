"""The supervisor: starts engines and API servers, watches them, tells every member who else is there, replaces those
that end or fall silent, and ends all of them.

Every process takes one path, at the first start and at every other: spawned, it binds its inbox and reports `Bound`; it
is sent `Attach`; it reports that it has started; everybody is told `Joined`; when it ends, everybody is told `Left`,
and a successor is spawned (`recovery.py` says whether and when, `seat.py` does it). A client that lives in this very
process (`LLM`) is adopted with its address, one of the user's registers with its own; both take the path from there.
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

from eagleray.config.api_keys import without_api_keys
from eagleray.config.resolve import expert_engines, local_ranks, served_names
from eagleray.config.sections import Config
from eagleray.errors import ChannelClosed, EagleRayError, EngineFailed
from eagleray.fleet.attach_file import attach_file
from eagleray.fleet.connection_monitor import ConnectionMonitor
from eagleray.fleet.expert_rendezvous import ExpertRendezvous
from eagleray.fleet.external_clients import ExternalClients
from eagleray.fleet.launcher import Launcher, OnExit, OnMessage, ProcessLauncher, Spawned
from eagleray.fleet.membership import replica_key
from eagleray.fleet.membership_publisher import MembershipPublisher
from eagleray.fleet.process_exit import ProcessExit
from eagleray.fleet.replica import END_SECONDS, Replica, ReplicaPhase
from eagleray.fleet.restart_policy import EndInstance, GiveUp, RestartDecision, RestartHistory, decide_restart
from eagleray.identity import ClientId, EngineId, MemberId, new_instance_name
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
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

START_MARGIN_SECONDS = 15.0
"""Beyond `startup_timeout`, by which a process ends its own waits, and says what it has waited for."""

MAX_ENGINE_DELAY = 30.0
MAX_API_SERVER_DELAY = 1.0
"""Longest pauses in seconds before the next start of an engine, which loads a model, and of an API server, without
which nobody is answered."""

FLUSH_SECONDS = 2.0
"""After a failure, what API servers get to tell their clients."""


class Supervisor:
    """Owns the processes and the membership. Lives in the event loop that it is made in; `stop` must be called.

    Make one with `open`. `engines` and `api_servers` spawn; `ends` is closed when all have ended.
    """

    def __init__(
        self,
        config: Config,
        *,
        instance: str,
        runtime_dir: Path,
        engines: Launcher[EngineSpec],
        api_servers: Launcher[ApiServerSpec],
        ray: RayContext | None,
        ends: AsyncExitStack,
    ) -> None:
        self.instance = instance
        self.runtime_dir = runtime_dir
        """Where the sockets of this instance are."""
        self.serving = asyncio.Event()
        """Set once everything that was started or adopted at first has started, or was given up, and clients know the
        engines."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the exception that ends this instance, never a result."""
        self._config = config
        self._engines = engines
        self._api_servers = api_servers
        self._ray = ray
        self._ends = ends
        self._seats: dict[MemberId, Replica] = {}
        """By place: the identity of the first that takes it."""
        self._adopted: set[ClientId] = set()
        """Clients of this process."""
        self._known: set[tuple[ClientId, EngineId]] = set()
        """Which client has said that it knows which engine; of the time until `serving` is set."""
        self._is_ending = False
        self._inbox: AsyncInbox[MemberToSupervisor] = AsyncInbox(
            runtime_dir, "supervisor", Codec(SUPERVISOR_INBOX).decode, host=self.host
        )
        ends.callback(self._inbox.close)
        self._board = MembershipPublisher(
            supervisor=self._inbox.address,
            runtime_dir=runtime_dir,
            host=self.host,
            heartbeat_timeout=config.execution.heartbeat_timeout,
            on_silent=partial(self._post, self._silent),
        )
        ends.callback(self._board.close)
        self._guests = ExternalClients(instance, self._board)
        self._connections = ConnectionMonitor(self._board, self._guests, lose=partial(self._guarded, self._lose))
        ends.callback(self._connections.close)
        self._experts = ExpertRendezvous(local_ranks(config)) if expert_engines(config) > 1 else None
        """None: engines do not share experts."""
        self._reader = self._loop.create_task(self._read_inbox(), name="supervisor-inbox")
        ends.push_async_callback(self._end_reader)

    @classmethod
    async def open(
        cls, config: Config, *, ray: RayContext | None = None, engine_target: str = "eagleray.engine.entry:run"
    ) -> Supervisor:
        """A supervisor that listens. `ray`: where this program is in a Ray cluster, if it is in one; engines go there.
        `engine_target`: `module:function` of engines that are processes.

        Raises `ConfigError`, or `ClusterError` if engines are to be Ray's and there is no way to it.
        """
        ends = AsyncExitStack()
        try:
            instance, runtime_dir = new_instance_name(config.execution.instance_name), make_runtime_dir()
            ends.callback(remove_runtime_dir, runtime_dir)
            if config.execution.instance_name is not None:
                logger.info("instance %s", instance)
            processes = ProcessLauncher(
                engine_target=engine_target,
                api_server_target="eagleray.server.entry:run",
                runtime_dir=str(runtime_dir),
                log_level=config.execution.log_level,
            )
            engines: Launcher[EngineSpec] = processes
            if config.parallel.data_parallel_backend == "ray":
                engines = await _open_ray(without_api_keys(config), instance, runtime_dir, ray)
                ends.push_async_callback(engines.close)
            supervisor = cls(
                config,
                instance=instance,
                runtime_dir=runtime_dir,
                engines=engines,
                api_servers=processes,
                ray=ray,
                ends=ends,
            )
            supervisor._write_attach_file()
        except BaseException:
            await ends.aclose()
            raise
        return supervisor

    @property
    def host(self) -> str | None:
        """Address of this host that members on other hosts reach; None if all are on this one."""
        return self._engines.host

    @property
    def engines(self) -> set[EngineId]:
        """Those that are there or are expected."""
        expected = (seat.expected for seat in self._seats.values())
        return {engine for engine in expected if isinstance(engine, EngineId)}

    def start_engines(self) -> None:
        """Start those that the configuration wants here."""
        for rank in local_ranks(self._config):
            self._take_seat(EngineId(self.instance, rank), self._spawn_engine)

    def start_api_servers(self, listener_fd: int) -> None:
        """Start those that the configuration wants; they accept from the socket `listener_fd`, which stays ours."""
        for index in range(self._config.serving.api_server_count):
            self._take_seat(ClientId(self.instance, index), partial(self._spawn_api_server, listener_fd))

    def adopt(self, client: ClientId, address: str) -> None:
        """A client in this process, whose inbox is bound at `address`, belongs to the fleet."""
        self._adopted.add(client)
        self._board.attach(client, address, has_pulse=False)

    async def stop(self, grace: float) -> None:
        """End every process: API servers first, which let running requests finish for `grace` seconds."""
        self._close_seats()
        stop = Stop(grace, cause=str(self.failed.exception()) if self.failed.done() else "")
        await asyncio.gather(self._end(ClientId, stop), self._guests.stop(stop))
        await self._end(EngineId, Stop(0.0, cause=stop.cause))
        await self._ends.aclose()
        if self.failed.done():
            self.failed.exception()  # whoever stops us has seen it or does not care

    @staticmethod
    def stop_seconds(grace: float) -> float:
        """The longest that `stop` may take."""
        return 2 * (grace + 4 * END_SECONDS)

    def kill(self) -> None:
        """End every process at once. `stop` is still needed, and quick then."""
        self._close_seats()
        for seat in self._seats.values():
            seat.kill()
        self._guests.close()
        self._engines.kill()

    def bound(self, member: MemberId, address: str) -> None:
        """For seats: `member` listens."""
        self._board.attach(member, address, has_pulse=True)
        if isinstance(member, EngineId):
            self._call_experts()

    def lost(self, loss: ProcessExit) -> None:
        """For seats: a member works no longer."""
        self._board.leave(Left(loss.member, str(loss.cause), returns=loss.returns))
        if loss.verdict is None:
            return
        logger.warning("%s is gone: %s; %s", loss.member.label, loss.cause, loss.what_follows)
        if loss.cause.traceback:
            logger.warning("%s", loss.cause.traceback.rstrip())
        if self._ends_instance(loss):
            self._fail(loss.as_exception())
            return
        if self._experts is not None and isinstance(loss.member, EngineId):
            self._experts.lose(loss.member)
            self._call_experts()
        self._check_serving()

    def _take_seat(self, first: MemberId, spawn: Callable[[MemberId, OnMessage, OnExit], Spawned]) -> None:
        seat = Replica(
            first,
            spawn=spawn,
            decide=partial(self._decide, first),
            watcher=self,
            post=self._post,
            start_seconds=self._start_seconds(first),
        )
        self._seats[replica_key(first)] = seat
        seat.start()

    def _start_seconds(self, member: MemberId) -> float:
        """An engine of Ray's waits for a place before it starts."""
        execution, ray = self._config.execution, self._config.ray
        waits = isinstance(member, EngineId) and self._config.parallel.data_parallel_backend == "ray"
        return execution.startup_timeout + waits * ray.ray_placement_timeout + START_MARGIN_SECONDS

    def _spawn_engine(self, engine: MemberId, on_message: OnMessage, on_exit: OnExit) -> Spawned:
        assert isinstance(engine, EngineId)
        self._prepare(engine)
        runtime_dir = str(self.runtime_dir) if self.host is None else ""  # elsewhere it is not
        spec = EngineSpec(engine, without_api_keys(self._config), runtime_dir, ray=self._ray)
        return self._engines.spawn(spec, on_message=on_message, on_exit=on_exit)

    def _spawn_api_server(self, listener_fd: int, client: MemberId, on_message: OnMessage, on_exit: OnExit) -> Spawned:
        assert isinstance(client, ClientId)
        self._prepare(client)
        spec = ApiServerSpec(client, self._config, str(self.runtime_dir), listener_fd, host=self.host)
        return self._api_servers.spawn(spec, on_message=on_message, on_exit=on_exit)

    def _prepare(self, member: MemberId) -> None:
        self._board.expect(member)
        if member.incarnation:
            remove_dead_sockets(self.runtime_dir)  # of the incarnation before, if it was killed

    def _decide(
        self, member: MemberId, history: RestartHistory, worked: float | None, cause: Failure
    ) -> tuple[RestartHistory, RestartDecision]:
        is_engine, max_restarts = isinstance(member, EngineId), self._config.recovery.max_engine_restarts
        return decide_restart(
            history,
            worked=worked,
            cause=cause,
            max_restarts=max_restarts if is_engine or max_restarts == 0 else None,
            max_delay=MAX_ENGINE_DELAY if is_engine else MAX_API_SERVER_DELAY,
            instance_has_served=self.serving.is_set(),
        )

    def _ends_instance(self, loss: ProcessExit) -> bool:
        """Nothing can be served without it. Engines that share experts cannot do without any of them."""
        if isinstance(loss.verdict, GiveUp):
            is_needed = self._experts is not None and isinstance(loss.member, EngineId)
            return is_needed or not self._has_others_like(loss.member)
        return isinstance(loss.verdict, EndInstance)

    def _has_others_like(self, member: MemberId) -> bool:
        return any(type(seat.expected) is type(member) for seat in self._seats.values())

    def _post(self, function: Callable[..., None], *args: object) -> None:
        """Call it in the event loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            self._loop.call_soon_threadsafe(self._guarded, function, *args)

    def _guarded(self, function: Callable[..., None], *args: object) -> None:
        """An exception ends the instance: half of what was to be done is not."""
        try:
            function(*args)
        except Exception as error:
            logger.exception("the supervisor failed")
            self._fail(EngineFailed(f"the supervisor failed: {type(error).__name__}: {error}"))

    async def _read_inbox(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                try:
                    message = await self._inbox.receive()
                except msgspec.MsgspecError as error:  # anybody who may enter the directory can write to the inbox
                    logger.warning("dropped what is no message to the supervisor: %s", error)
                else:
                    self._guarded(self._handle, message)

    def _handle(self, message: MemberToSupervisor) -> None:
        match message:
            case EngineStarted(engine, info):
                self._started(engine, info)
            case ClientStarted(client):
                self._started(client, None)
            case Knows(client, engine):
                if not self.serving.is_set():
                    self._known.add((client, engine))
                    self._check_serving()
            case Unreachable(sender, receiver):
                self._connections.broke(sender, receiver)
            case ExpertsOpened():
                self._opened(message)
            case Ended(EngineId() | ClientId() as member, cause):
                if seat := self._seat_of(member):
                    seat.lose(cause)
            case Ended():
                pass  # workers and drivers report to their own parents
            case Register():
                if not self._is_ending:
                    self._guests.register(message)
            case Alive(ClientId() as client):
                self._guests.renew(client)
            case Alive():
                pass  # engines have a pulse

    def _started(self, member: MemberId, info: EngineInfo | None) -> None:
        if member not in self._board:  # it has left, or was never here
            return
        if seat := self._seat_of(member):
            if seat.phase is not ReplicaPhase.STARTING:  # it has said so before
                return
            seconds_away = seat.started()
            if seconds_away is not None:
                logger.info("%s serves again after %.1f s", member.label, seconds_away)
        self._board.join(member, info)
        self._check_serving()

    def _opened(self, message: ExpertsOpened) -> None:
        """An engine can start when the others can."""
        engine, seat = message.engine, self._seat_of(message.engine)
        if self._experts is None or seat is None or engine not in self._board:
            return
        seat.wait_for_others()
        if self._experts.open(engine, message.epoch, message.opened):
            self._call_experts()

    def _call_experts(self) -> None:
        """Tell the engines that share experts what to do for their group, and whom it waits for."""
        if self._experts is None:
            return
        group = self._experts
        if group.is_complete:
            engines = [self._board.whereabouts(engine) for engine in group.engines]
            self._board.send_to_engines(ExpertsFormed(group.epoch, engines, group.members))
        else:
            self._board.send_to_engines(group.call)

    def _seat_of(self, member: MemberId) -> Replica | None:
        """None for those that have none, and for incarnations of the past."""
        seat = self._seats.get(replica_key(member))
        return seat if seat is not None and seat.member == member else None

    def _check_serving(self) -> None:
        settled = (seat.phase is ReplicaPhase.UP or seat.expected is None for seat in self._seats.values())
        up = {seat.member for seat in self._seats.values() if seat.phase is ReplicaPhase.UP}
        engines = {member for member in up if isinstance(member, EngineId)}
        clients = {member for member in up if isinstance(member, ClientId)} | self._adopted
        if all(settled) and self._known.issuperset(itertools.product(clients, engines)):
            self.serving.set()
            self._known.clear()

    def _silent(self, member: MemberId, seconds: float) -> None:
        self._lose(member, f"it was silent for {seconds:.0f} s")

    def _lose(self, member: MemberId, reason: str) -> None:
        if seat := self._seat_of(member):
            seat.lose(Failure.noticed(reason), at_once=True)

    def _fail(self, error: EagleRayError) -> None:
        """Nobody is started again; clients hear why."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self._close_seats()
            self._board.send_stop(self._board.clients, Stop(FLUSH_SECONDS, cause=str(error)))

    def _close_seats(self) -> None:
        self._is_ending = True
        self._connections.close()
        for seat in self._seats.values():
            seat.close()

    async def _end(self, kind: type[EngineId] | type[ClientId], stop: Stop) -> None:
        seats = [seat for seat in self._seats.values() if isinstance(seat.member, kind)]
        await asyncio.gather(*(self._end_one(seat, stop) for seat in seats))

    async def _end_one(self, seat: Replica, stop: Stop) -> None:
        """`Stop`, then SIGTERM, then SIGKILL, each when the one before has not helped in time."""
        means = [(END_SECONDS, seat.kill)]
        if seat.phase is ReplicaPhase.UP:
            self._board.send_stop([seat.member], stop)
            means.insert(0, (stop.grace + END_SECONDS, seat.terminate))
        elif seat.phase is ReplicaPhase.STARTING:  # it does not listen yet
            seat.terminate()
        for patience, stronger in means:
            if await seat.has_ended_within(patience):
                return
            logger.warning("%s did not end within %.0f s: %s", seat.member.label, patience, stronger.__name__)
            stronger()
        await seat.has_ended_within(END_SECONDS)

    async def _end_reader(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def _write_attach_file(self) -> None:
        if self._config.serving.attach_file is not None:
            self._ends.enter_context(
                attach_file(
                    Path(self._config.serving.attach_file).expanduser(),
                    instance=self.instance,
                    supervisor=self._inbox.address,
                    model=served_names(self._config.model)[0],
                )
            )


async def _open_ray(config: Config, instance: str, runtime_dir: Path, ray: RayContext | None) -> Launcher[EngineSpec]:
    from eagleray.fleet.ray_launcher import RayLauncher

    return await RayLauncher.open(config, instance=instance, runtime_dir=runtime_dir, ray=ray)
