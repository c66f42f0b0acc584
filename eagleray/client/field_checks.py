"""Checks of values that several kinds of calls take. Pure."""

from __future__ import annotations

from typing import Any

from eagleray.errors import InvalidRequest

MAX_TIMEOUT_SECONDS = 31_536_000
"""A year."""


def check_text(value: Any, param: str) -> None:
    """Raise `InvalidRequest` unless `value` is a text that can be encoded as UTF-8."""
    try:
        str.encode(value)
    except TypeError:
        raise InvalidRequest(f"`{param}` must be a text, but it is a {type(value).__name__}", param=param) from None
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{param}` is not valid Unicode: it has half of a surrogate pair", param=param) from None


def check_seconds(timeout: Any) -> None:
    """Raise `InvalidRequest` unless `timeout` is a number of seconds from above 0 to a year."""
    if not (isinstance(timeout, int | float) and 0 < timeout <= MAX_TIMEOUT_SECONDS):
        raise InvalidRequest(
            f"`timeout` must be a number of seconds above 0, at most {MAX_TIMEOUT_SECONDS}, but it is {timeout!r:.50}",
            param="timeout",
        )
