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
    cause: Failure
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
        return as_exception(self.member.label, self.cause)


def as_exception(label: str, cause: Failure) -> EagleRayError:
    """Return the exception for callers that need the process `label`, which ended because of `cause`."""
    if not cause.kind:
        return EngineFailed(f"{label} is gone: {cause.message}")
    if cause.is_user_error:
        return cause.as_user_error()
    return EngineFailed(f"{label} failed: {cause.kind}: {cause.message}\n{cause.traceback}".rstrip())
