"""Errors in the form of Anthropic's API. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from eagleray.server.error_responses import ErrorForm, HttpError

AnthropicErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
    "timeout_error",
]

ERROR_TYPES: dict[int, AnthropicErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types by status; all others are wrong requests."""


class AnthropicError(msgspec.Struct, kw_only=True):
    type: AnthropicErrorType
    message: str


class AnthropicErrorEvent(msgspec.Struct, tag_field="type", tag="error"):
    """The body of every answer that is not a success, and the data of an event that ends a stream early."""

    error: AnthropicError


def to_anthropic_error(error: HttpError) -> AnthropicErrorEvent:
    """Return the body for an error."""
    kind, wrong = ERROR_TYPES.get(error.status, "invalid_request_error"), error.reply.error
    # There is no place for the name of the field beside the message.
    is_named = wrong.param is None or f"`{wrong.param}`" in wrong.message
    message = wrong.message if is_named else f"`{wrong.param}`: {wrong.message}"
    return AnthropicErrorEvent(AnthropicError(type=kind, message=message))


ANTHROPIC_ERRORS = ErrorForm(AnthropicErrorEvent, to_anthropic_error, statuses={503: 529})
