"""Engines that are Ray actors, as the supervisor sees them: spawned, heard, ended. Without importing Ray.

A child process drives Ray (`ray_driver`): Ray ends a driver that has lost the cluster's control store, and this process
shall live on. When the child is gone its engines are; the next engine that is asked for gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from eagleray.config.sections import Config
from eagleray.errors import ChannelClosed, ClusterError, ClusterLost, EngineFailed
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
    SpawnEngine,
)
from eagleray.messages.workers import RayContext
from eagleray.process.spawn import Child
from eagleray.transport.heartbeat import HeartbeatMonitor
from eagleray.transport.inbox import AsyncInbox, Outbox

logger = get_logger(__name__)

ENGINE = "eagleray.engine.entry:Engine.bind"

CONNECT_SECONDS = 120.0
"""How long a driver may take to connect. Ray itself gives up earlier."""

END_SECONDS = 15.0

FIRST_DELAYS = (0.0, 1.0, 2.0)
"""Seconds before each further attempt to get a first driver connected."""

LOST_STORE = Failure.noticed("it ended with exit code 1")
"""What Ray does to a driver, without a word to us, a minute after the cluster's control store was lost."""


@dataclass(eq=False)
class RayEngine:
    """One engine, from when it is asked for to its end."""

    label: str
    spec: EngineSpec
    on_message: OnMessage
    on_exit: OnExit
    _end: Callable[[RayEngine], None]
    is_sent: bool = False
    """A driver was told to make it."""

    def terminate(self) -> None:
        """As `kill`: an engine that can end by itself is sent `Stop`."""
        self._end(self)

    def kill(self) -> None:
        """End the actor, its workers and its placement group. Harmless when it has ended."""
        self._end(self)


@dataclass(eq=False)
class _Driver:
    id: DriverId
    pulse: int
    timer: asyncio.TimerHandle
    """Until it is connected."""
    ready: DriverReady | None = None
    cause: Failure | None = None
    """Why it ended: its own report, the reason for which it was killed, or, once it has exited, the reason of that."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """It is connected, or has ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RayLauncher:
    """Lives in the event loop that it is opened in. Callbacks are called in that loop."""

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
        self._outbox: Outbox[str, LauncherToDriver] = Outbox(Codec[LauncherToDriver](LauncherToDriver).encode)
        self._reader = self._loop.create_task(self._read_inbox(), name="ray-launcher")
        self._pulse = HeartbeatMonitor.open(
            runtime_dir=runtime_dir,
            host=None,
            limit=config.execution.heartbeat_timeout,
            on_silent=lambda pulse, seconds: self._post(self._driver_is_silent, pulse, seconds),
        )
        self._driver: _Driver | None = None
        self._was_connected = False
        """A driver was: the cluster is the right one, whatever the next one says."""
        self._child: Child | None = None
        self._host = ""

    @classmethod
    async def open(
        cls,
        config: Config,
        *,
        instance: str,
        runtime_dir: Path,
        ray: RayContext | None = None,
        engine_target: str = ENGINE,
    ) -> RayLauncher:
        """Connected to the cluster that `config` names, or that the program of `ray` is in.

        Raises `ClusterError`, or `EngineFailed` if the process that drives Ray ended for another reason.
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
        """Does not wait. `on_message` gets what a process would say to its parent; `on_exit` is called once, last."""
        engine = RayEngine(spec.engine.label, spec, on_message, on_exit, self._end)
        driver = self._driver or self._start_driver()
        self._engines[spec.engine] = engine
        if driver.ready is not None:
            self._send(engine)
        return engine

    async def close(self) -> None:
        """End what is left, and the driver."""
        if self._driver is not None and self._child is not None:
            driver = self._driver
            for means in (self._child.terminate, self._child.kill):
                means()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(driver.ended.wait(), END_SECONDS)
                    break
        self._pulse.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._inbox.close()
        self._outbox.close()

    def kill(self) -> None:
        """End everything at once. `close` is still needed, and quick then."""
        if self._driver is not None and self._child is not None:
            self._child.kill()

    async def _connect_first(self) -> None:
        """A driver that dies while it starts is replaced a few times: who has killed it, or its cluster, may not do it
        again."""
        for delay in (*FIRST_DELAYS, None):
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
        name = DriverId(self._instance, self._num_drivers)
        pulse, ticket = self._pulse.invite()
        spec = DriverSpec(
            driver=name,
            config=self._config,
            runtime_dir=str(self._runtime_dir),
            launcher=self._inbox.address,
            ray=self._ray,
            engine_target=self._engine_target,
            heartbeat=ticket,
        )
        timer = self._loop.call_later(CONNECT_SECONDS, self._connection_is_late)
        driver = _Driver(name, pulse, timer)
        self._child = Child(
            target="eagleray.fleet.ray_driver:run",
            member=name,
            payload=msgspec.msgpack.encode(spec),
            log_level=self._config.execution.log_level,
            runtime_dir=str(self._runtime_dir),
            on_message=lambda message: self._post(self._driver_said, driver, message),
            on_exit=lambda cause: self._post(self._driver_ended, driver, cause),
        )
        self._num_drivers += 1
        self._driver = driver
        return driver

    def _connection_is_late(self) -> None:
        if (driver := self._driver) is not None and self._child is not None:
            late = ClusterError(f"Ray: no connection within {CONNECT_SECONDS:.0f} s (the process that drives it hangs)")
            driver.cause = _as_loss(Failure.of(late)) if self._was_connected else Failure.of(late)
            self._child.kill()

    def _driver_is_silent(self, pulse: int, seconds: float) -> None:
        """It hangs, or was stopped: it can neither tell of its engines nor end them."""
        if (driver := self._driver) is not None and driver.pulse == pulse and self._child is not None:
            driver.cause = Failure.of(EngineFailed(f"it was silent for {seconds:.0f} s"))
            self._child.kill()

    async def _read_inbox(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                match await self._inbox.receive():
                    case DriverReady() as ready:
                        self._connect(ready)
                    case Bound(EngineId() as name) as message:
                        if engine := self._engines.get(name):
                            engine.on_message(message)
                    case Ended(EngineId() as name, cause):
                        if engine := self._engines.pop(name, None):
                            engine.on_exit(cause)

    def _connect(self, ready: DriverReady) -> None:
        driver = self._driver
        if driver is None or driver.id != ready.driver:  # it has ended meanwhile
            return
        driver.timer.cancel()
        driver.ready = ready
        self._host = ready.host
        self._was_connected = True
        if ready.is_own:
            self._config = _with_local_cluster(self._config)
        elif self._ray is None or self._ray.address != ready.cluster:
            self._ray = RayContext(address=ready.cluster)  # successors join the same cluster, or say why they cannot
        self._outbox.connect("driver", ready.address)
        for engine in self._engines.values():
            self._send(engine)
        driver.answered.set()

    def _send(self, engine: RayEngine) -> None:
        engine.is_sent = True
        self._outbox.send("driver", SpawnEngine(engine.spec))

    def _end(self, engine: RayEngine) -> None:
        name = engine.spec.engine
        if self._engines.get(name) is not engine:
            return
        if engine.is_sent:
            self._outbox.send("driver", KillEngine(name))
        else:
            del self._engines[name]
            self._loop.call_soon(engine.on_exit, Failure.noticed("it was told to end before it was made"))

    def _driver_said(self, driver: _Driver, message: ChildToParent) -> None:
        if isinstance(message, Ended):
            driver.cause = _as_loss(message.cause) if self._was_connected else message.cause

    def _driver_ended(self, driver: _Driver, exit_cause: Failure) -> None:
        has_lost_store = exit_cause == LOST_STORE and driver.ready is not None
        hint = " (as Ray does when the cluster's control store is lost)" if has_lost_store else ""
        driver.timer.cancel()
        self._pulse.forget(driver.pulse)
        reported = driver.cause
        driver.cause = reported or Failure.noticed(exit_cause.message + hint)
        driver.answered.set()
        driver.ended.set()
        self._driver = None
        self._outbox.disconnect("driver", linger_ms=0)
        engines, self._engines = self._engines, {}
        for engine in engines.values():
            engine.on_exit(reported or Failure.noticed(f"the process that drives Ray ended: {driver.cause}"))

    def _post(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            self._loop.call_soon_threadsafe(function, *args)


def _as_loss(cause: Failure) -> Failure:
    """Return the cause as `ClusterLost`: earlier drivers were connected to the cluster, so the user made no mistake."""
    if cause.kind != ClusterError.__name__:
        return cause
    return Failure.of(ClusterLost(cause.message))


def _with_local_cluster(config: Config) -> Config:
    """Return the configuration for successors of a driver that started a cluster: they start one too."""
    ray = msgspec.structs.replace(config.ray, ray_address="local")
    return msgspec.structs.replace(config, ray=ray)
