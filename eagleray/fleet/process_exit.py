"""Somebody does not work any more: who, why, what follows, and what that means to others."""

from __future__ import annotations

from dataclasses import dataclass

from eagleray.errors import EagleRayError, EngineFailed
from eagleray.fleet.restart_policy import EndInstance, Restart, RestartDecision
from eagleray.identity import MemberId, successor
from eagleray.messages.failure import Failure


@dataclass(frozen=True)
class ProcessExit:
    member: MemberId
    reason: str
    failure: Failure | None
    """What it said of its end, if it could."""
    verdict: RestartDecision | None
    """None: it was to end."""

    @property
    def returns(self) -> bool:
        """A successor is on its way."""
        return isinstance(self.verdict, Restart)

    @property
    def what_follows(self) -> str:
        match self.verdict:
            case Restart(delay, failed_starts):
                when = f" in {delay:g} s" if delay else ""
                why = f" ({failed_starts} starts in a row have failed)" if failed_starts > 1 else ""
                return f"starting {successor(self.member).label}{when}{why}"
            case EndInstance():
                return "the instance ends"
            case _:
                return "it is given up"

    def as_exception(self) -> EagleRayError:
        """For whoever waits for this instance, which ends because of it."""
        return as_exception(self.member.label, self.reason, self.failure)


def as_exception(who: str, reason: str, failure: Failure | None) -> EagleRayError:
    """What the end of a process means to whoever needs it. `failure`: what it said of its end, if it could."""
    if failure is None:
        return EngineFailed(f"{who} is gone: {reason}")
    if failure.is_user_error:
        return failure.as_user_error()
    return EngineFailed(f"{who} failed: {failure}\n{failure.traceback}".rstrip())
