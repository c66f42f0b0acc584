"""What follows when an engine or an API server has ended. Pure: what has happened is handed in."""

from __future__ import annotations

from dataclasses import dataclass

from eagleray.errors import ClusterError
from eagleray.messages.failure import Failure

__all__ = ["Again", "EndInstance", "GiveUp", "History", "Verdict", "decide"]

WORKED_SECONDS = 10.0
"""Who has worked for so long has earned the whole budget of restarts again."""

FIRST_DELAY = 0.5
MAX_DELAY = 30.0
"""The first restart is at once, the second after the first delay; it doubles with each, up to the greatest."""


@dataclass(frozen=True)
class History:
    """What was tried in a row, for one engine or API server. `spent` counts against the budget, `tries` do not all."""

    spent: int = 0
    tries: int = 0
    has_served: bool = False


@dataclass(frozen=True)
class Again:
    """Start a successor after `delay` seconds."""

    delay: float


@dataclass(frozen=True)
class GiveUp:
    """It does not come back; the others go on, if there are others."""


@dataclass(frozen=True)
class EndInstance:
    """To try again would end in the same way: the user has to mend something."""


Verdict = Again | GiveUp | EndInstance


def decide(
    history: History,
    *,
    worked: float | None,
    failure: Failure | None,
    max_restarts: int,
    instance_has_served: bool,
) -> tuple[History, Verdict]:
    """What follows from an end, and the history to hand in at the next.

    `worked`: seconds from its start to its end, None if it never started; `failure`: what it said of its end.
    """
    if failure is not None and failure.is_user_error and not instance_has_served:
        return history, EndInstance()
    if worked is not None:
        has_earned = worked >= WORKED_SECONDS
        spent, tries = (0, 0) if has_earned else (history.spent, history.tries)
        history = History(spent=spent, tries=tries, has_served=True)
    # A cluster that is lost for a while is no fault of the engine: it is tried for as long as it takes.
    is_counted = not (history.has_served and failure is not None and failure.kind == ClusterError.__name__)
    if is_counted and history.spent >= max_restarts:
        return history, GiveUp()
    delay = 0.0 if history.tries == 0 else min(MAX_DELAY, FIRST_DELAY * 2 ** (history.tries - 1))
    return History(spent=history.spent + is_counted, tries=history.tries + 1, has_served=history.has_served), Again(
        delay
    )
