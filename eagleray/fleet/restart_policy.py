"""The decision that follows the exit of an engine or an API server. Pure: the supervisor passes in the cause.

An exit is of one of three kinds:

- Its cause is outside of the process: a signal, a lost node, silence, a lost driver or cluster of Ray, a worker that
  exited. The process is restarted for as long as it takes.
- The process raised an exception of its own. Such exits are counted against a budget.
- The process raised the same exception in two starts in a row. A further start would end in the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from eagleray.errors import ClusterError, ClusterLost, DeadlineExceeded, EngineFailed, ProcessCrashed, WorkerLost
from eagleray.fleet import timeouts
from eagleray.messages.failure import Failure

EXITS_OF_OTHERS = frozenset({WorkerLost.__name__, EngineFailed.__name__, ClusterLost.__name__})
"""Kinds of failures by which a process reports the exit of another, of a node or of a cluster."""

VARYING = re.compile(r"0x[0-9a-f]+|\d[\d.]*")
"""Parts of a message that differ from start to start: incarnations, ports, addresses, sizes."""


@dataclass(frozen=True)
class RestartHistory:
    """Recent exits of the incarnations of one engine or API server."""

    spent: int = 0
    """Exits in a row by exceptions of its own."""
    is_unsteady: bool = False
    """Whether it was restarted and has not run for `STEADY_SECONDS` since."""
    failed_starts: int = 0
    """Exits in a row before the start was complete."""
    has_served: bool = False
    start_failure: str | None = None
    """Exception that the last start raised; None if the last exit had another cause."""


@dataclass(frozen=True)
class Restart:
    """Start a replacement after `delay` seconds."""

    delay: float
    failed_starts: int = 0
    """Starts in a row that ended before they were complete."""


@dataclass(frozen=True)
class GiveUp:
    """Start no replacement; other members of the kind, if any are left, continue."""


@dataclass(frozen=True)
class EndInstance:
    """End the instance: a further start would end in the same way, until the user corrects something."""


RestartDecision = Restart | GiveUp | EndInstance


def decide_restart(
    history: RestartHistory,
    *,
    uptime: float | None,
    cause: Failure,
    max_restarts: int | None,
    max_delay: float,
    instance_has_served: bool,
) -> tuple[RestartHistory, RestartDecision]:
    """Return the history to pass in at the next exit, and the decision that follows this one.

    `uptime` is the time in seconds from the complete start to the exit, None if the start was not complete.
    `max_restarts` is the budget of exits by exceptions of its own, None for no limit; 0 means that nothing is ever
    restarted.
    """
    if cause.is_user_error and not instance_has_served:
        return history, EndInstance()
    if max_restarts == 0:
        return history, GiveUp()
    history = _after_start(history, uptime)
    is_own = not _is_from_outside(cause, history)
    if cause.kind == ProcessCrashed.__name__:
        # At work a request may be the reason, and requests have a budget of their own.
        is_own = uptime is None and not instance_has_served
    start_failure = None
    if is_own and uptime is None and cause.kind != DeadlineExceeded.__name__:
        start_failure = f"{cause.kind}: {VARYING.sub('#', cause.message)}"
        if start_failure == history.start_failure:
            return history, GiveUp() if instance_has_served else EndInstance()
    if is_own and max_restarts is not None and history.spent >= max_restarts:
        return history, GiveUp()
    doublings = min(max(0, history.failed_starts - 1), 10)
    first_delay = timeouts.FIRST_RESTART_DELAY_SECONDS
    delay = min(max_delay, first_delay * 2**doublings) if history.is_unsteady else 0.0
    history = replace(
        history,
        spent=history.spent + is_own,
        is_unsteady=True,
        failed_starts=history.failed_starts + (uptime is None),
        start_failure=start_failure,
    )
    return history, Restart(delay, history.failed_starts)


def _after_start(history: RestartHistory, uptime: float | None) -> RestartHistory:
    """Clear the part of the history that a complete start disproves."""
    if uptime is None:
        return history
    if uptime >= timeouts.STEADY_SECONDS:
        return RestartHistory(has_served=True)
    return replace(history, failed_starts=0, has_served=True, start_failure=None)


def _is_from_outside(cause: Failure, history: RestartHistory) -> bool:
    """Whether the process raised nothing, or reports the exit of others."""
    is_lost_cluster = cause.kind == ClusterError.__name__ and history.has_served
    return not cause.kind or cause.kind in EXITS_OF_OTHERS or cause.library == "ray" or is_lost_cluster
