"""Decides what follows when an engine or an API server has ended. Pure: callers hand in what happened.

An end is one of three kinds:

- It came from outside: a signal, a lost node, silence, a lost driver or cluster of Ray, a dead worker. A successor is
  started for as long as it takes.
- The process failed by an exception of its own. Such ends are counted against a budget.
- Its start raised what the start before it had raised. Another try would end in the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from eagleray.errors import ClusterError, ClusterLost, DeadlineExceeded, EngineFailed, ProcessCrashed, WorkerLost
from eagleray.messages.failure import Failure

WORKED_SECONDS = 10.0
"""A process that has worked for this long has earned the whole budget of restarts again."""

FIRST_DELAY = 0.5
"""Seconds before the second restart in a row; the first one is at once. The delay doubles with each start that fails.
A process that ended soon after its start has no longer delay than this: it can start, and requests wait for it."""

LOST = frozenset({WorkerLost.__name__, EngineFailed.__name__, ClusterLost.__name__})
"""Kinds of failures by which a process reports the end of another, of a node or of a cluster."""

VARYING = re.compile(r"0x[0-9a-f]+|\d[\d.]*")
"""Parts of a message that differ from start to start: incarnations, ports, addresses, sizes."""


@dataclass(frozen=True)
class RestartHistory:
    """The recent ends of the incarnations of one engine or API server."""

    spent: int = 0
    """Ends in a row by failures of its own."""
    is_unsteady: bool = False
    """It was restarted, and has not worked for `WORKED_SECONDS` since."""
    failed_starts: int = 0
    """Ends in a row before the start was done."""
    has_served: bool = False
    start_failure: str | None = None
    """Exception that the last start raised; None: the last end was a different one."""


@dataclass(frozen=True)
class Restart:
    """Start a successor after `delay` seconds."""

    delay: float
    failed_starts: int = 0
    """Starts in a row that ended before they were done."""


@dataclass(frozen=True)
class GiveUp:
    """It does not come back; the others go on, if there are others."""


@dataclass(frozen=True)
class EndInstance:
    """To try again would end in the same way: the user has to mend something."""


RestartDecision = Restart | GiveUp | EndInstance


def decide_restart(
    history: RestartHistory,
    *,
    worked: float | None,
    cause: Failure,
    max_restarts: int | None,
    max_delay: float,
    instance_has_served: bool,
) -> tuple[RestartHistory, RestartDecision]:
    """Return what follows from an end, and the history to hand in at the next one.

    `worked`: seconds from its start to its end, None if it never started;
    `max_restarts`: budget of failures of its own, None for no limit; with 0 nothing is ever started again.
    """
    if cause.is_user_error and not instance_has_served:
        return history, EndInstance()
    if max_restarts == 0:
        return history, GiveUp()
    history = _after_start(history, worked)
    is_own = not _is_from_outside(cause, history)
    if cause.kind == ProcessCrashed.__name__:
        # At work it may be a request's fault, which has a budget of its own.
        is_own = worked is None and not instance_has_served
    start_failure = None
    if is_own and worked is None and cause.kind != DeadlineExceeded.__name__:
        start_failure = f"{cause.kind}: {VARYING.sub('#', cause.message)}"
        if start_failure == history.start_failure:
            return history, GiveUp() if instance_has_served else EndInstance()
    if is_own and max_restarts is not None and history.spent >= max_restarts:
        return history, GiveUp()
    doublings = min(max(0, history.failed_starts - 1), 10)
    delay = min(max_delay, FIRST_DELAY * 2**doublings) if history.is_unsteady else 0.0
    history = replace(
        history,
        spent=history.spent + is_own,
        is_unsteady=True,
        failed_starts=history.failed_starts + (worked is None),
        start_failure=start_failure,
    )
    return history, Restart(delay, history.failed_starts)


def _after_start(history: RestartHistory, worked: float | None) -> RestartHistory:
    """Forget what a start that succeeded disproves."""
    if worked is None:
        return history
    if worked >= WORKED_SECONDS:
        return RestartHistory(has_served=True)
    return replace(history, failed_starts=0, has_served=True, start_failure=None)


def _is_from_outside(cause: Failure, history: RestartHistory) -> bool:
    """Whether the process raised nothing, or reports an exit of others."""
    is_lost_cluster = cause.kind == ClusterError.__name__ and history.has_served
    return not cause.kind or cause.kind in LOST or cause.library == "ray" or is_lost_cluster
