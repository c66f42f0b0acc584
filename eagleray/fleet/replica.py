"""A replica of the fleet: the incarnations of an engine or an API server, one after another.

Every incarnation takes the same path, the first as the tenth: it is spawned, reports its address, works, exits; its
replacement starts when nothing of it is left. Pure: owned by `FleetState`, which reacts to what the methods return.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from eagleray.fleet import timeouts
from eagleray.fleet.process_exit import ProcessExit
from eagleray.fleet.restart_policy import Restart, RestartDecision, RestartHistory
from eagleray.fleet.turn import Kill, Spawn, Terminate, Turn
from eagleray.identity import MemberId, next_incarnation, replica_key
from eagleray.log import get_logger
from eagleray.messages.failure import Failure

logger = get_logger(__name__)

Decide = Callable[[RestartHistory, float | None, Failure], tuple[RestartHistory, RestartDecision]]


@dataclass(frozen=True)
class Starting:
    ready_since: float | None = None
    """Time since which the incarnation is ready and only waits for other engines."""


@dataclass(frozen=True)
class Up:
    since: float


class Means(enum.Enum):
    """The means by which an incarnation was last told to exit, from the weakest to the strongest."""

    STOP = "told to stop"
    TERMINATE = "terminated"
    KILL = "killed"


@dataclass(frozen=True)
class Leaving:
    """The incarnation was told to stop, and is a member until it exits."""

    means: Means


@dataclass(frozen=True)
class Ending:
    """The incarnation is no member any more. Its process still runs, and may hold what its replacement needs."""

    decision: RestartDecision | None
    """None: nothing follows, because it was told to stop."""
    means: Means | None
    """None: it has failed, and exits by itself."""


@dataclass(frozen=True)
class Backoff:
    """The incarnation has exited; its replacement starts after a delay."""


@dataclass(frozen=True)
class Vacant:
    """There is no process, and none will start."""


ReplicaState = Starting | Up | Leaving | Ending | Backoff | Vacant


class Replica:
    """`first` is spawned by `start`. `decide` decides what follows an exit. `start_seconds`: time limit of a start.

    The timer of the replica has its key, and `FleetState` calls `pass_time` when it is due.
    """

    def __init__(self, first: MemberId, *, turn: Turn, decide: Decide, start_seconds: float) -> None:
        self.key = replica_key(first)
        self.member = first
        """The newest incarnation."""
        self.state: ReplicaState = Vacant()
        self.is_closed = False
        """Whether no further incarnation starts."""
        self.is_stuck = False
        """Whether the process was killed and still runs `STOP_TIMEOUT_SECONDS` later."""
        self._turn = turn
        self._decide = decide
        self.start_seconds = start_seconds
        self._history = RestartHistory()
        self._failed_at: float | None = None

    @property
    def expected(self) -> MemberId | None:
        """The present or next incarnation; None if there will be none."""
        match self.state:
            case Starting() | Up() | Leaving():
                return self.member
            case Ending(Restart()) | Backoff() if not self.is_closed:
                return next_incarnation(self.member)
            case _:
                return None

    @property
    def is_settled(self) -> bool:
        """Whether the replica is up, or will never be."""
        return isinstance(self.state, Up) or self.expected is None

    @property
    def is_gone(self) -> bool:
        """Whether there is no process, and none will start."""
        return isinstance(self.state, Vacant)

    # Commands of the fleet.

    def start(self) -> None:
        """Spawn `member`."""
        self.state, self.is_stuck = Starting(), False
        self._set_timer(self.start_seconds)
        self._turn.act(Spawn(self.member))

    def set_up(self) -> bool:
        """Record that the incarnation has started. Returns False if it had started already."""
        if not isinstance(self.state, Starting):
            return False
        self._cancel_timer()
        self.state = Up(since=self._turn.now if self.state.ready_since is None else self.state.ready_since)
        return True

    def wait_for_others(self) -> None:
        """Drop the deadline of the start: the incarnation is ready, and only waits for other engines."""
        if isinstance(self.state, Starting):
            self._cancel_timer()
            if self.state.ready_since is None:
                self.state = Starting(ready_since=self._turn.now)

    def end_downtime(self) -> float | None:
        """Return the seconds since an earlier incarnation failed, once; None if none did."""
        failed_at, self._failed_at = self._failed_at, None
        return None if failed_at is None else self._turn.now - failed_at

    def close(self) -> None:
        """Start no further incarnation. The present one is expected to exit from now on."""
        self.is_closed = True
        if isinstance(self.state, Starting | Backoff):
            self._cancel_timer()
        if isinstance(self.state, Backoff):
            self.state = Vacant()

    def stop(self, grace: float) -> bool:
        """Have the process exit, by stronger means when the weaker ones have not helped in time. Returns whether `Stop`
        with this grace is to be sent, for the means to begin with."""
        assert self.is_closed
        match self.state:
            case Up():
                self.state = Leaving(Means.STOP)
                self._set_timer(grace + timeouts.STOP_TIMEOUT_SECONDS)
                return True
            case Starting():  # it may not read its inbox yet
                self._strengthen(Means.TERMINATE)
            case Ending():
                self._set_timer(timeouts.STOP_TIMEOUT_SECONDS)
        return False

    def leave(self, *, returns: bool) -> bool:
        """End an incarnation that is to go although nothing is wrong with it, and start another one if it `returns`.
        Returns whether `Stop` is to be sent, so that it exits by itself."""
        self.is_closed = self.is_closed or not returns
        decision = Restart(0.0) if returns else None
        match self.state:
            case Up():
                self.state = Ending(decision, Means.STOP)
                self._set_timer(timeouts.STOP_TIMEOUT_SECONDS)
                return True
            case Starting():  # it may not read its inbox yet
                self.state = Ending(decision, None)
                self._strengthen(Means.KILL)
            case Backoff():
                self._cancel_timer()
                self.state = Vacant()
            case Ending(_, means):
                self.state = Ending(decision, means)
        return False

    def kill(self) -> None:
        """Kill the process, if there is one."""
        if not isinstance(self.state, Backoff | Vacant):
            self._turn.act(Kill(self.member))

    # Events.

    def fail(self, cause: Failure, *, kills: bool = False) -> ProcessExit | None:
        """End the incarnation. Its process is killed, now or if it has not exited after `STOP_TIMEOUT_SECONDS`.

        Returns None if it has ended already.
        """
        now = self._turn.now
        match self.state:
            case Starting(ready_since=since) | Up(since):
                means = None
            case Leaving(means):
                since = None
            case _:
                return None
        decision: RestartDecision | None = None
        if not self.is_closed:
            self._history, decision = self._decide(self._history, None if since is None else now - since, cause)
        self._failed_at = now if self._failed_at is None else self._failed_at
        self.state = Ending(decision, means)
        if kills:
            self._strengthen(Means.KILL)
        elif means is None:
            self._set_timer(timeouts.STOP_TIMEOUT_SECONDS)
        return ProcessExit(self.member, cause, decision)

    def on_exit(self, cause: Failure) -> ProcessExit | None:
        """Handle the exit of the process. Returns None if it was no member any more."""
        ended = self.fail(cause)
        self._cancel_timer()
        self.is_stuck = False
        if isinstance(self.state, Ending) and isinstance(self.state.decision, Restart) and not self.is_closed:
            delay = self.state.decision.delay
            self.state = Backoff()
            self._set_timer(delay)
        else:
            self.state = Vacant()
        return ended

    def pass_time(self) -> ProcessExit | None:
        """Handle the timer. Returns the exit of an incarnation that took too long to start."""
        match self.state:
            case Starting():
                reason = f"it had not started after {self.start_seconds:.0f} s (option `startup_timeout`)"
                return self.fail(Failure.noticed(reason), kills=True)
            case Backoff():
                self.member = next_incarnation(self.member)
                self.start()
            case Leaving(Means.STOP):
                self._warn_and_strengthen(Means.TERMINATE, "of being told to")
            case Leaving(Means.TERMINATE) | Ending(_, Means.STOP | Means.TERMINATE):
                self._warn_and_strengthen(Means.KILL, "of being told to")
            case Ending(_, None):
                self._warn_and_strengthen(Means.KILL, "of its failure")
            case Leaving(Means.KILL) | Ending(_, Means.KILL):
                self._warn_that_it_runs()
        return None

    def _warn_and_strengthen(self, means: Means, since: str) -> None:
        seconds = timeouts.STOP_TIMEOUT_SECONDS
        logger.warning("%s has not exited within %.0f s %s: it is %s", self.member.label, seconds, since, means.value)
        self._strengthen(means)

    def _strengthen(self, means: Means) -> None:
        """Use the next means, and wait for its effect."""
        self._turn.act(Kill(self.member) if means is Means.KILL else Terminate(self.member))
        decision = self.state.decision if isinstance(self.state, Ending) else None
        self.state = Ending(decision, means) if isinstance(self.state, Ending) else Leaving(means)
        self._set_timer(timeouts.STOP_TIMEOUT_SECONDS)

    def _warn_that_it_runs(self) -> None:
        then = "" if self.is_closed else "; its replacement starts when it has exited"
        seconds = timeouts.STOP_TIMEOUT_SECONDS
        logger.warning("%s still runs %.0f s after it was killed%s", self.member.label, seconds, then)
        self.is_stuck = True
        self._strengthen(Means.KILL)

    def _set_timer(self, seconds: float) -> None:
        self._turn.timers.set(self.key, self._turn.now + seconds)

    def _cancel_timer(self) -> None:
        self._turn.timers.cancel(self.key)
