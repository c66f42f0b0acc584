"""The exit of a member: its cause, the decision that follows, and what both mean to callers."""

from __future__ import annotations

from dataclasses import dataclass

from eagleray.errors import EagleRayError, EngineFailed
from eagleray.fleet.restart_policy import EndInstance, Restart, RestartDecision
from eagleray.identity import MemberId, next_incarnation
from eagleray.messages.failure import Failure


@dataclass(frozen=True)
class ProcessExit:
    member: MemberId
    cause: Failure
    decision: RestartDecision | None
    """None: the member was told to stop."""

    @property
    def is_replaced(self) -> bool:
        """Whether a replacement follows."""
        return isinstance(self.decision, Restart)

    @property
    def next_step(self) -> str:
        """Description of the decision for the log."""
        match self.decision:
            case Restart(delay, failed_starts):
                when = f" in {delay:g} s" if delay else ""
                why = f" ({failed_starts} starts in a row have failed)" if failed_starts > 1 else ""
                return f"starting {next_incarnation(self.member).label}{when}{why}"
            case EndInstance():
                return "the instance ends"
            case _:
                return "it is given up"

    def as_exception(self) -> EagleRayError:
        """Return the exception for callers that wait for an instance which ends because of this exit."""
        return as_exception(self.member.label, self.cause)


def as_exception(label: str, cause: Failure) -> EagleRayError:
    """Return the exception for callers that need the process `label`, which ended because of `cause`."""
    if not cause.kind:
        return EngineFailed(f"{label} is gone: {cause.message}")
    if cause.is_user_error:
        return cause.as_user_error()
    return EngineFailed(f"{label} failed: {cause.kind}: {cause.message}\n{cause.traceback}".rstrip())
