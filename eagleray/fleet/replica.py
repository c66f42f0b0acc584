"""A replica of the fleet: the incarnations of an engine or an API server, one after another.

Every incarnation takes the same path, the first as the tenth: it is spawned, reports its address, works, exits; its
replacement starts when nothing of it is left. Driven by the supervisor, in its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable
from functools import partial

from eagleray.errors import EagleRayError
from eagleray.fleet import timeouts
from eagleray.fleet.launcher import OnExit, OnMessage, Spawned
from eagleray.fleet.process_exit import ProcessExit
from eagleray.fleet.restart_policy import Restart, RestartDecision, RestartHistory
from eagleray.identity import MemberId, next_incarnation
from eagleray.log import get_logger
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import Bound, ChildToParent

logger = get_logger(__name__)

Spawn = Callable[[MemberId, OnMessage, OnExit], Spawned]
Decide = Callable[[RestartHistory, float | None, Failure], tuple[RestartHistory, RestartDecision]]


class ReplicaPhase(enum.Enum):
    STARTING = enum.auto()
    UP = enum.auto()
    STOPPING = enum.auto()
    """The incarnation has failed and still runs: it may hold what its replacement needs."""
    BACKOFF = enum.auto()
    """The incarnation has exited; its replacement starts after a delay."""
    VACANT = enum.auto()
    """There is no process, and none will start."""


class Replica:
    """`spawn` starts an incarnation, `decide` follows its exit. `post(function, *args)` calls a function in the event
    loop, from any thread. `on_bound(member, address)` is called in the event loop, and so is `on_failed(exit)`: at once
    when an incarnation fails, which may be long before its process has exited."""

    def __init__(
        self,
        first: MemberId,
        *,
        spawn: Spawn,
        decide: Decide,
        on_bound: Callable[[MemberId, str], None],
        on_failed: Callable[[ProcessExit], None],
        post: Callable[..., None],
        start_seconds: float,
    ) -> None:
        self.member = first
        """The newest incarnation."""
        self.phase = ReplicaPhase.VACANT
        self._exited = asyncio.Event()
        """Set while there is no process."""
        self._exited.set()
        self._spawn = spawn
        self._decide = decide
        self._on_bound = on_bound
        self._on_failed = on_failed
        self._post = post
        self._start_seconds = start_seconds
        self._loop = asyncio.get_running_loop()
        self._history = RestartHistory()
        self._decision: RestartDecision | None = None
        self._spawned: Spawned | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the phase: the deadline of the start or of the exit, or the delay."""
        self._working_since: float | None = None
        self._failed_at: float | None = None
        self._is_closed = False

    @property
    def expected(self) -> MemberId | None:
        """The present or next incarnation; None if there will be none."""
        match self.phase:
            case ReplicaPhase.STARTING | ReplicaPhase.UP:
                return self.member
            case ReplicaPhase.STOPPING if not isinstance(self._decision, Restart):
                return None
            case ReplicaPhase.STOPPING | ReplicaPhase.BACKOFF:
                return next_incarnation(self.member)
            case ReplicaPhase.VACANT:
                return None

    def start(self) -> None:
        """Spawn `member`."""
        member = self.member
        self.phase = ReplicaPhase.STARTING
        self._working_since = None
        self._exited.clear()
        self._set_timer(self._start_seconds, self._on_start_timeout)
        try:
            self._spawned = self._spawn(
                member, partial(self._post, self._on_message, member), partial(self._post, self._on_exit, member)
            )
        except (OSError, EagleRayError) as error:
            self._on_exit(member, Failure.noticed(f"it could not be started: {error}"))

    def set_up(self) -> None:
        """Enter UP."""
        assert self.phase is ReplicaPhase.STARTING
        self._set_timer(None)
        self.phase = ReplicaPhase.UP
        self._working_since = self._working_since or self._loop.time()

    def end_downtime(self) -> float | None:
        """Return the seconds since an earlier incarnation failed, once; None if none did."""
        failed_at, self._failed_at = self._failed_at, None
        return None if failed_at is None else self._loop.time() - failed_at

    def wait_for_others(self) -> None:
        """Drop the deadline of the start: the incarnation is ready, and only waits for other engines."""
        if self.phase is ReplicaPhase.STARTING:
            self._set_timer(None)
            self._working_since = self._working_since or self._loop.time()

    def fail(self, cause: Failure, *, kill_now: bool = False) -> None:
        """Enter STOPPING. The process is killed now, or if it has not exited after `STOP_TIMEOUT_SECONDS`."""
        if self.phase not in (ReplicaPhase.STARTING, ReplicaPhase.UP):
            return
        now = self._loop.time()
        uptime = None if self._working_since is None else now - self._working_since
        self._decision = None
        if not self._is_closed:
            self._history, self._decision = self._decide(self._history, uptime, cause)
        self.phase = ReplicaPhase.STOPPING
        self._failed_at = now if self._failed_at is None else self._failed_at
        if kill_now:
            self._kill_and_wait()
        else:
            self._set_timer(timeouts.STOP_TIMEOUT_SECONDS, self._escalate)
        self._on_failed(ProcessExit(self.member, cause, self._decision))

    def kill(self) -> None:
        """Kill the process, if there is one."""
        if self._spawned is not None:
            self._spawned.kill()

    def close(self) -> None:
        """Start no further incarnation. The present one is expected to exit from now on."""
        self._is_closed = True
        if self.phase in (ReplicaPhase.STARTING, ReplicaPhase.BACKOFF):
            self._set_timer(None)
        if self.phase is ReplicaPhase.BACKOFF:
            self.phase = ReplicaPhase.VACANT

    async def stop(self, send_stop: Callable[[], None], grace: float) -> None:
        """Send `Stop`, then SIGTERM, then SIGKILL, each when the means before has not helped in time. Returns when the
        process has exited, or was killed and still has not."""
        timeout = timeouts.STOP_TIMEOUT_SECONDS
        means = [(timeout, "killed", self.kill)]
        if self.phase is ReplicaPhase.UP:
            send_stop()
            means.insert(0, (grace + timeout, "terminated", self._terminate))
        elif self.phase is ReplicaPhase.STARTING:  # it may not read its inbox yet
            self._terminate()
        for seconds, name, stronger in means:
            if await self._wait_for_exit(seconds):
                return
            logger.warning("%s did not exit within %.0f s of being told to: it is %s", self.member.label, seconds, name)
            stronger()
        await self._wait_for_exit(timeout)

    def _terminate(self) -> None:
        if self._spawned is not None:
            self._spawned.terminate()

    async def _wait_for_exit(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()
        return self._exited.is_set()

    def _on_message(self, member: MemberId, message: ChildToParent) -> None:
        if member != self.member or self.phase not in (ReplicaPhase.STARTING, ReplicaPhase.UP):
            return
        match message:
            case Bound(_, address):
                self._on_bound(member, address)
            case Ended(_, cause):
                self.fail(cause)

    def _on_exit(self, member: MemberId, cause: Failure) -> None:
        self._spawned = None
        self.fail(cause)
        self._set_timer(None)
        self._exited.set()
        if isinstance(self._decision, Restart) and not self._is_closed:
            self.phase = ReplicaPhase.BACKOFF
            self._set_timer(self._decision.delay, self._start_replacement)
        else:
            self.phase = ReplicaPhase.VACANT

    def _start_replacement(self) -> None:
        self.member = next_incarnation(self.member)
        self.start()

    def _on_start_timeout(self) -> None:
        reason = f"it had not started after {self._start_seconds:.0f} s (option `startup_timeout`)"
        self.fail(Failure.noticed(reason), kill_now=True)

    def _escalate(self) -> None:
        seconds = timeouts.STOP_TIMEOUT_SECONDS
        logger.warning("%s has not exited within %.0f s of its failure: it is killed", self.member.label, seconds)
        self._kill_and_wait()

    def _kill_and_wait(self) -> None:
        self.kill()
        self._set_timer(timeouts.STOP_TIMEOUT_SECONDS, self._warn_still_running)

    def _warn_still_running(self) -> None:
        seconds = timeouts.STOP_TIMEOUT_SECONDS
        logger.warning(
            "%s still runs %.0f s after it was killed; its replacement starts when it has exited",
            self.member.label,
            seconds,
        )
        self._kill_and_wait()

    def _set_timer(self, seconds: float | None, function: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None and function is not None:
            self._timer = self._loop.call_later(seconds, function)
