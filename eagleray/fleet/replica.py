"""One place in the fleet, and those that take it one after another: the incarnations of an engine or an API server.

Every incarnation takes the same path, the first and the tenth: it is spawned, says where it listens, works, ends; its
successor follows when nothing of it is left. Driven by the supervisor, in its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable
from functools import partial
from typing import Protocol

from eagleray.errors import EagleRayError
from eagleray.fleet.launcher import OnExit, OnMessage, Spawned
from eagleray.fleet.process_exit import ProcessExit
from eagleray.fleet.restart_policy import Restart, RestartDecision, RestartHistory
from eagleray.identity import MemberId, successor
from eagleray.log import get_logger
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import Bound, ChildToParent

logger = get_logger(__name__)

END_SECONDS = 15.0
"""How long a process may take to end after it was told or has failed, before the next stronger means. An engine has
workers to end first."""

Spawn = Callable[[MemberId, OnMessage, OnExit], Spawned]
Decide = Callable[[RestartHistory, float | None, Failure], tuple[RestartHistory, RestartDecision]]


class ReplicaPhase(enum.Enum):
    STARTING = enum.auto()
    UP = enum.auto()
    ENDING = enum.auto()
    """Lost, but not gone: it may still hold what its successor needs."""
    WAITING = enum.auto()
    """Gone; its successor comes after a delay."""
    VACANT = enum.auto()
    """Nobody is here, and nobody comes."""


class ReplicaObserver(Protocol):
    """Hears what becomes of an incarnation, in the event loop."""

    def bound(self, member: MemberId, address: str) -> None: ...

    def lost(self, loss: ProcessExit) -> None:
        """At once; what is left of it may take a while to end."""


class Replica:
    """`spawn` starts an incarnation. `post(function, *args)` calls a function in the event loop, from any thread."""

    def __init__(
        self,
        first: MemberId,
        *,
        spawn: Spawn,
        decide: Decide,
        watcher: ReplicaObserver,
        post: Callable[..., None],
        start_seconds: float,
    ) -> None:
        self.member = first
        """The newest incarnation."""
        self.phase = ReplicaPhase.VACANT
        self._ended = asyncio.Event()
        """Set while there is no process."""
        self._ended.set()
        self._spawn = spawn
        self._decide = decide
        self._watcher = watcher
        self._post = post
        self._start_seconds = start_seconds
        self._loop = asyncio.get_running_loop()
        self._history = RestartHistory()
        self._verdict: RestartDecision | None = None
        self._spawned: Spawned | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Of the phase: the start's deadline, the patience with an end, or the delay."""
        self._working_since: float | None = None
        self._lost_at: float | None = None
        self._is_closed = False

    @property
    def expected(self) -> MemberId | None:
        """Who is here, or comes next; None: nobody."""
        match self.phase:
            case ReplicaPhase.STARTING | ReplicaPhase.UP:
                return self.member
            case ReplicaPhase.ENDING if not isinstance(self._verdict, Restart):
                return None
            case ReplicaPhase.ENDING | ReplicaPhase.WAITING:
                return successor(self.member)
            case ReplicaPhase.VACANT:
                return None

    def start(self) -> None:
        """Spawn `member`."""
        member = self.member
        self.phase = ReplicaPhase.STARTING
        self._working_since = None
        self._ended.clear()
        self._set_timer(self._start_seconds, self._start_is_late)
        try:
            self._spawned = self._spawn(
                member, partial(self._post, self._heard, member), partial(self._post, self._exited, member)
            )
        except (OSError, EagleRayError) as error:
            self._exited(member, Failure.noticed(f"it could not be started: {error}"))

    def started(self) -> float | None:
        """It works. Seconds since an earlier incarnation was lost; None for the first."""
        assert self.phase is ReplicaPhase.STARTING
        self._set_timer(None)
        self.phase = ReplicaPhase.UP
        now = self._loop.time()
        self._working_since = self._working_since or now
        lost_at, self._lost_at = self._lost_at, None
        return None if lost_at is None else now - lost_at

    def wait_for_others(self) -> None:
        """It is ready, and starts when others are: their time is not held against it."""
        if self.phase is ReplicaPhase.STARTING:
            self._set_timer(None)
            self._working_since = self._working_since or self._loop.time()

    def lose(self, cause: Failure, *, at_once: bool = False) -> None:
        """It does not work any more. It is killed: if it has not ended by itself after a while, or at once."""
        if self.phase not in (ReplicaPhase.STARTING, ReplicaPhase.UP):
            return
        now = self._loop.time()
        worked = None if self._working_since is None else now - self._working_since
        self._verdict = None
        if not self._is_closed:
            self._history, self._verdict = self._decide(self._history, worked, cause)
        self.phase = ReplicaPhase.ENDING
        self._lost_at = now if self._lost_at is None else self._lost_at
        if at_once:
            self._kill_and_wait()
        else:
            self._set_timer(END_SECONDS, self._insist)
        self._watcher.lost(ProcessExit(self.member, cause, self._verdict))

    def terminate(self) -> None:
        """Ask the process to end, if there is one."""
        if self._spawned is not None:
            self._spawned.terminate()

    def kill(self) -> None:
        """End the process, if there is one."""
        if self._spawned is not None:
            self._spawned.kill()

    async def has_ended_within(self, seconds: float) -> bool:
        """Whether there is no process, now or within so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        return self._ended.is_set()

    def close(self) -> None:
        """Nobody comes any more. Who is here is to end, and has no successor."""
        self._is_closed = True
        if self.phase in (ReplicaPhase.STARTING, ReplicaPhase.WAITING):
            self._set_timer(None)
        if self.phase is ReplicaPhase.WAITING:
            self.phase = ReplicaPhase.VACANT

    def _heard(self, member: MemberId, message: ChildToParent) -> None:
        if member != self.member or self.phase not in (ReplicaPhase.STARTING, ReplicaPhase.UP):
            return
        match message:
            case Bound(_, address):
                self._watcher.bound(member, address)
            case Ended(_, cause):
                self.lose(cause)

    def _exited(self, member: MemberId, cause: Failure) -> None:
        self._spawned = None
        self.lose(cause)
        self._set_timer(None)
        self._ended.set()
        if isinstance(self._verdict, Restart) and not self._is_closed:
            self.phase = ReplicaPhase.WAITING
            self._set_timer(self._verdict.delay, self._follow)
        else:
            self.phase = ReplicaPhase.VACANT

    def _follow(self) -> None:
        self.member = successor(self.member)
        self.start()

    def _start_is_late(self) -> None:
        late = f"it had not started after {self._start_seconds:.0f} s (option `startup_timeout`)"
        self.lose(Failure.noticed(late), at_once=True)

    def _insist(self) -> None:
        logger.warning("%s has not ended within %.0f s: it is killed", self.member.label, END_SECONDS)
        self._kill_and_wait()

    def _kill_and_wait(self) -> None:
        self.kill()
        self._set_timer(END_SECONDS, self._complain)

    def _complain(self) -> None:
        logger.warning("%s was killed and does not end: its successor has to wait for that", self.member.label)
        self._kill_and_wait()

    def _set_timer(self, seconds: float | None, function: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None and function is not None:
            self._timer = self._loop.call_later(seconds, function)
