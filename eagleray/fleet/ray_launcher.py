"""The launcher of engines that are Ray actors. Does not import Ray.

A child process drives Ray (`ray_driver`), because Ray aborts a driver that has lost the cluster's control store, and
the supervisor's process must survive that. When the child exits, its engines exit with it; the next engine that is
spawned gets a new child.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from eagleray.config.log_config import log_settings
from eagleray.config.sections import Config
from eagleray.errors import ChannelClosed, ClusterError, ClusterLost, EngineFailed
from eagleray.fleet import timeouts
from eagleray.fleet.launcher import OnExit, OnMessage
from eagleray.fleet.process_exit import as_exception
from eagleray.identity import DriverId, EngineId
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import (
    Bound,
    ChildToParent,
    DriverReady,
    DriverSpec,
    DriverToLauncher,
    EngineSpec,
    KillEngine,
    LauncherToDriver,
    NodeDraining,
    SpawnEngine,
)
from eagleray.messages.workers import RayContext
from eagleray.process.spawn import Child
from eagleray.transport.heartbeat import HeartbeatMonitor
from eagleray.transport.inbox import AsyncInbox, Outbox

logger = get_logger(__name__)

ENGINE_TARGET = "eagleray.engine.entry:Engine.bind"

ABORTED_BY_RAY = Failure.noticed("it ended with exit code 1")
"""Exit of a driver that Ray aborts, without a report, a minute after the cluster's control store was lost."""


@dataclass(eq=False)
class RayEngine:
    """An engine from its spawn to its exit."""

    spec: EngineSpec
    on_message: OnMessage
    on_exit: OnExit
    _kill: Callable[[RayEngine], None]
    is_sent: bool = False
    """Whether a driver was told to create it."""

    def terminate(self) -> None:
        """Kill the engine: one that can exit by itself is sent `Stop` instead."""
        self._kill(self)

    def kill(self) -> None:
        """Kill the actor and its workers, and remove its placement group. Harmless after the exit."""
        self._kill(self)


@dataclass(eq=False)
class _Driver:
    id: DriverId
    heartbeat_number: int
    timer: asyncio.TimerHandle
    """Deadline of the connection to Ray."""
    child: Child
    ready: DriverReady | None = None
    cause: Failure | None = None
    """Cause that the driver reported or that it is killed for; once it has exited, the cause of that."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the driver is connected, or has exited."""
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class RayLauncher:
    """Open one with `open`, in the event loop that it is to run in. Callbacks are called in that loop."""

    def __init__(
        self, config: Config, *, instance: str, runtime_dir: Path, ray: RayContext | None, engine_target: str
    ) -> None:
        self._config = config
        self._instance = instance
        self._runtime_dir = runtime_dir
        self._ray = ray
        self._engine_target = engine_target
        self._loop = asyncio.get_running_loop()
        self._engines: dict[EngineId, RayEngine] = {}
        self._num_drivers = 0
        self._inbox: AsyncInbox[DriverToLauncher] = AsyncInbox(runtime_dir, "launcher", Codec(DriverToLauncher).decode)
        self._outbox: Outbox[DriverId, LauncherToDriver] = Outbox(Codec[LauncherToDriver](LauncherToDriver).encode)
        self._reader = self._loop.create_task(self._read_inbox(), name="ray-launcher")
        self._heartbeats = HeartbeatMonitor.open(
            runtime_dir=runtime_dir,
            host=None,
            limit=config.execution.heartbeat_timeout,
            on_silent=lambda number, seconds: self._post(self._on_driver_silent, number, seconds),
        )
        self._driver: _Driver | None = None
        self._was_connected = False
        """Whether a driver has been connected: then the cluster is the right one, whatever a later driver reports."""
        self._host = ""

    @classmethod
    async def open(
        cls,
        config: Config,
        *,
        instance: str,
        runtime_dir: Path,
        ray: RayContext | None = None,
        engine_target: str = ENGINE_TARGET,
    ) -> RayLauncher:
        """Connect to the cluster that `config` names, or that the program of `ray` is in.

        Raises `ClusterError`, or `EngineFailed` if the driver exited for another reason.
        """
        launcher = cls(config, instance=instance, runtime_dir=runtime_dir, ray=ray, engine_target=engine_target)
        try:
            await launcher._connect_first()
        except BaseException:
            await launcher.close()
            raise
        return launcher

    @property
    def host(self) -> str:
        """Address of this host for the other nodes of the cluster."""
        return self._host

    def spawn(self, spec: EngineSpec, *, on_message: OnMessage, on_exit: OnExit) -> RayEngine:
        """Spawn without waiting; see `Launcher.spawn`. `on_message` gets `Bound` and `NodeDraining` only."""
        engine = RayEngine(spec, on_message, on_exit, self._kill_engine)
        driver = self._driver or self._start_driver()
        self._engines[spec.engine] = engine
        if driver.ready is not None:
            self._send(engine, driver)
        return engine

    async def close(self) -> None:
        """Stop the driver, which kills the engines that are left."""
        if (driver := self._driver) is not None:
            for means in (driver.child.terminate, driver.child.kill):
                means()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(driver.exited.wait(), timeouts.DRIVER_STOP_TIMEOUT_SECONDS)
                    break
        self._heartbeats.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._inbox.close()
        self._outbox.close()

    def kill(self) -> None:
        """Kill the driver, and the engines with it. `close` must still be called, and is quick then."""
        if self._driver is not None:
            self._driver.child.kill()

    async def _connect_first(self) -> None:
        """Start the first driver. One that is killed while it starts is replaced a few times."""
        for delay in (*timeouts.DRIVER_RETRY_DELAYS_SECONDS, None):
            driver = self._start_driver()
            await driver.answered.wait()
            if driver.ready is not None:
                return
            assert driver.cause is not None
            error = as_exception("the process that drives Ray", driver.cause)
            if delay is None or driver.cause.kind not in ("", ClusterLost.__name__):
                raise error
            logger.warning("%s; starting another one in %g s", error, delay)
            await asyncio.sleep(delay)

    def _start_driver(self) -> _Driver:
        driver_id = DriverId(self._instance, self._num_drivers)
        number, handle = self._heartbeats.invite()
        spec = DriverSpec(
            driver=driver_id,
            config=self._config,
            runtime_dir=str(self._runtime_dir),
            launcher=self._inbox.address,
            ray=self._ray,
            engine_target=self._engine_target,
            heartbeat=handle,
        )
        child = Child(
            target="eagleray.fleet.ray_driver:run",
            member=driver_id,
            payload=msgspec.msgpack.encode(spec),
            log=log_settings(self._config),
            runtime_dir=str(self._runtime_dir),
            on_message=lambda message: self._post(self._on_driver_message, driver_id, message),
            on_exit=lambda cause: self._post(self._on_driver_exit, driver_id, cause),
        )
        timer = self._loop.call_later(timeouts.DRIVER_CONNECT_TIMEOUT_SECONDS, self._on_connect_timeout)
        self._num_drivers += 1
        self._driver = _Driver(driver_id, number, timer, child)
        return self._driver

    def _on_connect_timeout(self) -> None:
        if (driver := self._driver) is not None:
            seconds = timeouts.DRIVER_CONNECT_TIMEOUT_SECONDS
            late = ClusterError(f"Ray: no connection within {seconds:.0f} s (the process that drives it hangs)")
            driver.cause = self._as_lost(Failure.of(late))
            driver.child.kill()

    def _on_driver_silent(self, number: int, seconds: float) -> None:
        """Kill the driver: it hangs or was stopped, so it can neither report about its engines nor kill them."""
        if (driver := self._driver) is not None and driver.heartbeat_number == number:
            driver.cause = Failure.of(EngineFailed(f"it was silent for {seconds:.0f} s"))
            driver.child.kill()

    async def _read_inbox(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                match await self._inbox.receive():
                    case DriverReady() as ready:
                        self._on_driver_ready(ready)
                    case Bound(EngineId() as name) as message:
                        if engine := self._engines.get(name):
                            engine.on_message(message)
                    case NodeDraining(name) as notice:
                        if engine := self._engines.get(name):
                            engine.on_message(notice)
                    case Ended(EngineId() as name, cause):
                        if engine := self._engines.pop(name, None):
                            engine.on_exit(cause)

    def _on_driver_ready(self, ready: DriverReady) -> None:
        driver = self._driver
        if driver is None or driver.id != ready.driver:  # it has exited meanwhile
            return
        driver.timer.cancel()
        driver.ready = ready
        self._host = ready.host
        self._was_connected = True
        if ready.is_own:
            self._config = _with_local_cluster(self._config)
        elif self._ray is None or self._ray.address != ready.cluster:
            # Later drivers join the same cluster, or report why they cannot.
            self._ray = RayContext(address=ready.cluster)
        self._outbox.connect(driver.id, ready.address)
        for engine in self._engines.values():
            self._send(engine, driver)
        driver.answered.set()

    def _on_driver_message(self, driver_id: DriverId, message: ChildToParent) -> None:
        driver = self._driver
        if driver is not None and driver.id == driver_id and isinstance(message, Ended):
            driver.cause = self._as_lost(message.cause)

    def _on_driver_exit(self, driver_id: DriverId, cause: Failure) -> None:
        driver = self._driver
        if driver is None or driver.id != driver_id:
            return
        driver.timer.cancel()
        self._heartbeats.forget(driver.heartbeat_number)
        reported = driver.cause
        has_lost_store = cause == ABORTED_BY_RAY and driver.ready is not None
        hint = " (as Ray does when the cluster's control store is lost)" if has_lost_store else ""
        driver.cause = reported or Failure.noticed(cause.message + hint)
        driver.answered.set()
        driver.exited.set()
        self._driver = None
        self._outbox.disconnect(driver.id, linger_ms=0)
        engines, self._engines = self._engines, {}
        for engine in engines.values():
            engine.on_exit(reported or Failure.noticed(f"the process that drives Ray ended: {driver.cause}"))

    def _send(self, engine: RayEngine, driver: _Driver) -> None:
        engine.is_sent = True
        self._outbox.send(driver.id, SpawnEngine(engine.spec))

    def _kill_engine(self, engine: RayEngine) -> None:
        name = engine.spec.engine
        if self._engines.get(name) is not engine:
            return
        if engine.is_sent and self._driver is not None:
            self._outbox.send(self._driver.id, KillEngine(name))
        else:
            del self._engines[name]
            self._loop.call_soon(engine.on_exit, Failure.noticed("it was told to end before it was made"))

    def _as_lost(self, cause: Failure) -> Failure:
        """Return a `ClusterError` as `ClusterLost` if a driver was connected before: then the user made no mistake."""
        if not self._was_connected or cause.kind != ClusterError.__name__:
            return cause
        return Failure.of(ClusterLost(cause.message))

    def _post(self, function: Callable[..., None], *args: object) -> None:
        """Call the function in the event loop; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the launcher is
            self._loop.call_soon_threadsafe(function, *args)


def _with_local_cluster(config: Config) -> Config:
    """Return the configuration for later drivers, after one that started a cluster: they start one too."""
    ray = msgspec.structs.replace(config.ray, ray_address="local")
    return msgspec.structs.replace(config, ray=ray)
