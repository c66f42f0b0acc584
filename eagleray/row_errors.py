"""Errors of single prompts among several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from eagleray.errors import DeadlineExceeded, EagleRayError, RequestFailed, UserError

ROW_ERRORS = (UserError, RequestFailed, DeadlineExceeded)
"""Errors that concern one prompt. Others, such as the failure of the instance, concern all."""


@dataclass(frozen=True)
class RequestError:
    """The place of a prompt without an output, in results under `errors="return"`."""

    index: int
    """Index of the prompt."""
    error: EagleRayError

    finished = True
    """As in outputs: nothing more comes for this prompt."""

    @property
    def message(self) -> str:
        """Reason why there is no output."""
        return str(self.error)


def name_row(error: EagleRayError, index: int, *, is_one_of_several: bool) -> EagleRayError:
    """Return the error with the prompt's index in its message."""
    if is_one_of_several:
        error.args = (f"prompt {index}: {error}", *error.args[1:])
    return error


@contextmanager
def naming_row(index: int, *, is_one_of_several: bool) -> Iterator[None]:
    """Name the prompt in an error that concerns it alone."""
    try:
        yield
    except ROW_ERRORS as error:
        raise name_row(error, index, is_one_of_several=is_one_of_several) from None
