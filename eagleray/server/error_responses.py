"""Exceptions as HTTP answers: one table, one form of body.

`{"error": {"message", "type", "param", "code"}}`, with the types and codes that clients of OpenAI's API expect.
"""

from __future__ import annotations

import traceback
from typing import Literal, NamedTuple

import msgspec

from eagleray.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    Unavailable,
    UnknownModel,
    UserError,
    WorkerFailed,
)
from eagleray.log import get_logger

logger = get_logger(__name__)


class UnknownRoute(UserError):
    """No such URL."""


class WrongMethod(UserError):
    """The URL exists, for other methods: `allowed`."""

    def __init__(self, message: str, *, allowed: list[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class BodyTooLarge(UserError):
    """The request's body is longer than the server accepts."""


class MalformedRequest(UserError):
    """The bytes that arrived are not a request of HTTP/1.1."""


class HeadersTooLarge(UserError):
    """The request line and headers are longer, or more, than the server accepts."""


class RequestTimedOut(UserError):
    """The client has not sent the rest of its request in time."""


class WrongApiKey(UserError):
    """No key, or one that this server does not know."""


ErrorType = Literal["invalid_request_error", "requests", "server_error"]
"""`requests`: there are too many of them."""


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    type: ErrorType
    param: str | None
    """The field of the request that is to blame."""
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and the data of an event that ends a stream early."""

    error: ErrorBody


class ErrorRule(NamedTuple):
    """How an exception is told: the fields of the body, and the status if nothing has been sent yet."""

    status: int
    type: ErrorType
    code: str | None


TABLE: dict[type[Exception], ErrorRule] = {
    UserError: ErrorRule(400, "invalid_request_error", None),
    InvalidRequest: ErrorRule(400, "invalid_request_error", None),
    PromptTooLong: ErrorRule(400, "invalid_request_error", "context_length_exceeded"),
    WrongApiKey: ErrorRule(401, "invalid_request_error", "invalid_api_key"),
    UnknownModel: ErrorRule(404, "invalid_request_error", "model_not_found"),
    UnknownRoute: ErrorRule(404, "invalid_request_error", "unknown_url"),
    WrongMethod: ErrorRule(405, "invalid_request_error", "method_not_allowed"),
    MalformedRequest: ErrorRule(400, "invalid_request_error", "malformed_request"),
    RequestTimedOut: ErrorRule(408, "invalid_request_error", "request_timeout"),
    BodyTooLarge: ErrorRule(413, "invalid_request_error", "request_too_large"),
    HeadersTooLarge: ErrorRule(431, "invalid_request_error", "headers_too_large"),
    Overloaded: ErrorRule(429, "requests", "rate_limit_exceeded"),
    RequestFailed: ErrorRule(500, "server_error", "request_failed"),
    EngineFailed: ErrorRule(500, "server_error", "engine_failed"),
    WorkerFailed: ErrorRule(500, "server_error", "worker_failed"),
    Unavailable: ErrorRule(503, "server_error", "unavailable"),
    DeadlineExceeded: ErrorRule(504, "server_error", "deadline_exceeded"),
    Exception: ErrorRule(500, "server_error", "internal_error"),
}


class HttpError(NamedTuple):
    """An error, ready to be sent."""

    status: int
    headers: dict[str, str]
    reply: ErrorResponse


def error_response(error: Exception, request_id: str) -> HttpError:
    """What to answer. An exception that nobody meant to raise is logged here, and not shown to the user."""
    kind = next(kind for kind in type(error).__mro__ if kind in TABLE)
    rule = TABLE[kind]
    message = str(error)
    if kind is Exception:
        logger.error("request %s: unexpected error\n%s", request_id, "".join(traceback.format_exception(error)))
        message = f"internal error; the server's log has the cause under request id {request_id}"
    elif rule.status == 500:
        logger.warning("request %s failed: %s", request_id, message)
    return HttpError(
        rule.status, _headers(error), ErrorResponse(ErrorBody(message, rule.type, _param(error), rule.code))
    )


def _param(error: Exception) -> str | None:
    if isinstance(error, InvalidRequest):
        return error.param
    return "model" if isinstance(error, UnknownModel) else None


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, Unavailable):
        return {"retry-after": str(error.retry_after)}
    if isinstance(error, WrongMethod):
        return {"allow": ", ".join(error.allowed)}
    if isinstance(error, WrongApiKey):
        return {"www-authenticate": "Bearer"}
    return {}
