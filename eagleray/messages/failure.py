"""An exception that crosses a process, as a value."""

from __future__ import annotations

import traceback

import msgspec

from eagleray import errors
from eagleray.errors import EagleRayError, UserError


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, told so that the reader of another process can name the cause."""

    kind: str
    """Name of the exception's class."""
    message: str
    traceback: str = ""
    is_user_error: bool = False
    """The message is for the user and complete; the traceback is of no interest."""
    library: str = ""
    """Top-level package that defines the exception's class, such as `ray`; empty if it is not known."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(
            kind=type(error).__name__,
            message=str(error),
            # what we raise on purpose says all in its message
            traceback="" if isinstance(error, EagleRayError) else "".join(traceback.format_exception(error)),
            is_user_error=isinstance(error, UserError),
            library=type(error).__module__.partition(".")[0],
        )

    def as_user_error(self) -> EagleRayError:
        """The exception that it was, if `is_user_error`."""
        error: EagleRayError = getattr(errors, self.kind, UserError)(self.message)
        return error

    def __str__(self) -> str:
        return self.message if self.is_user_error else f"{self.kind}: {self.message}"
