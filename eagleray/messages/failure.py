"""Causes of ends, as values that cross process boundaries."""

from __future__ import annotations

import traceback

import msgspec

from eagleray import errors
from eagleray.errors import EagleRayError, InvalidRequest, ProcessCrashed, UserError
from eagleray.identity import ProcessId


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception that a process raised, or an exit that others noticed, with a text that names the cause."""

    kind: str
    """Name of the exception's class; empty if the process raised none: it was killed, fell silent or returned."""
    message: str
    traceback: str = ""
    is_user_error: bool = False
    """The message is for the user and complete; the traceback is of no interest."""
    library: str = ""
    """Top-level package that defines the exception's class, such as `ray`; empty if it is not known."""
    param: str | None = None
    """Field of the request that an `InvalidRequest` names."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(
            kind=type(error).__name__,
            message=str(error),
            # An error that eagleray raises on purpose says everything in its message.
            traceback="" if isinstance(error, EagleRayError) else "".join(traceback.format_exception(error)),
            is_user_error=isinstance(error, UserError),
            library=type(error).__module__.partition(".")[0],
            param=error.param if isinstance(error, InvalidRequest) else None,
        )

    @classmethod
    def noticed(cls, reason: str) -> Failure:
        """Make the failure of a process that was found exited or silent and reported no exception."""
        return cls(kind="", message=reason)

    @property
    def is_exception(self) -> bool:
        """Whether the process raised an exception and reported it."""
        return self.kind not in ("", ProcessCrashed.__name__)

    def as_user_error(self) -> EagleRayError:
        """Return the exception that it was, if `is_user_error`."""
        error: EagleRayError = getattr(errors, self.kind, UserError)(self.message)
        if isinstance(error, InvalidRequest):
            error.param = self.param
        return error

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.is_exception and not self.is_user_error else self.message


class Ended(msgspec.Struct, frozen=True, tag=True):
    """`member` ends because of `cause`.

    A process sends it before it exits, a worker in reply to a call that failed; the driver of Ray sends it about an
    engine when the actor is gone.
    """

    member: ProcessId
    cause: Failure
