"""Exceptions as HTTP answers: one table, one form of body.

`{"error": {"message", "type", "param", "code"}}`, with the types and codes that clients of OpenAI's API expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from eagleray.errors import (
    DeadlineExceeded,
    EngineFailed,
    EnginesMissing,
    InvalidRequest,
    NotFound,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    TransferBroken,
    Unavailable,
    UnknownModel,
    UnsupportedParameter,
    UserError,
    WeightsMismatch,
    WorkerFailed,
    WrongState,
)
from eagleray.log import get_logger

logger = get_logger(__name__)

ErrorType = Literal["invalid_request_error", "requests", "server_error"]
"""`requests` means that there are too many of them."""

MAX_REASONS = 16
"""Number of reasons that an error names; the others are counted."""


class ErrorBody(msgspec.Struct, frozen=True):
    """A description of the error."""

    message: str
    type: ErrorType
    param: str | None
    """Field of the request that is to blame."""
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and the data of an event that ends a stream early."""

    error: ErrorBody


class ErrorRule(NamedTuple):
    """The answer to one kind of exception. The status counts only if no part of an answer was sent before."""

    status: int
    type: ErrorType
    code: str | None


TABLE: dict[type[Exception], ErrorRule] = {
    UserError: ErrorRule(400, "invalid_request_error", None),
    InvalidRequest: ErrorRule(400, "invalid_request_error", None),
    UnsupportedParameter: ErrorRule(400, "invalid_request_error", "unsupported_parameter"),
    PromptTooLong: ErrorRule(400, "invalid_request_error", "context_length_exceeded"),
    UnknownModel: ErrorRule(404, "invalid_request_error", "model_not_found"),
    NotFound: ErrorRule(404, "invalid_request_error", "not_found"),
    WrongState: ErrorRule(409, "invalid_request_error", "wrong_state"),
    WeightsMismatch: ErrorRule(400, "invalid_request_error", "weights_mismatch"),
    Overloaded: ErrorRule(429, "requests", "rate_limit_exceeded"),
    RequestFailed: ErrorRule(500, "server_error", "request_failed"),
    EngineFailed: ErrorRule(500, "server_error", "engine_failed"),
    WorkerFailed: ErrorRule(500, "server_error", "worker_failed"),
    Unavailable: ErrorRule(503, "server_error", "unavailable"),
    EnginesMissing: ErrorRule(503, "server_error", "engines_missing"),
    TransferBroken: ErrorRule(503, "server_error", "transfer_broken"),
    DeadlineExceeded: ErrorRule(504, "server_error", "deadline_exceeded"),
    Exception: ErrorRule(500, "server_error", "internal_error"),
}

MALFORMED_REQUEST = ErrorRule(400, "invalid_request_error", "malformed_request")
WRONG_API_KEY = ErrorRule(401, "invalid_request_error", "invalid_api_key")
CONTROL_FORBIDDEN = ErrorRule(403, "invalid_request_error", "control_forbidden")
ENGINE_UNRESPONSIVE = ErrorRule(503, "server_error", "engine_unresponsive")
UNKNOWN_ROUTE = ErrorRule(404, "invalid_request_error", "unknown_url")
WRONG_METHOD = ErrorRule(405, "invalid_request_error", "method_not_allowed")
REQUEST_TIMED_OUT = ErrorRule(408, "invalid_request_error", "request_timeout")
BODY_TOO_LARGE = ErrorRule(413, "invalid_request_error", "request_too_large")
UNSUPPORTED_ENCODING = ErrorRule(415, "invalid_request_error", "unsupported_encoding")
ORIGIN_REFUSED = ErrorRule(400, "invalid_request_error", "origin_not_allowed")
HEADERS_TOO_LARGE = ErrorRule(431, "invalid_request_error", "headers_too_large")
"""Rules for requests whose HTTP is wrong. The exception itself carries its rule."""


class RefusedRequest(UserError):
    """A request whose HTTP is wrong."""

    # With a default, because `copy.copy` makes a new exception of the message alone before it copies the attributes.
    def __init__(self, message: str, rule: ErrorRule = MALFORMED_REQUEST, headers: Mapping[str, str] = {}) -> None:
        super().__init__(message)
        self.rule = rule
        self.headers = dict(headers)


class InvalidFields(InvalidRequest):
    """A request with several wrong or unsupported fields. Unsupported ones come first: users ask for them on purpose,
    and the other fields are often wrong only because the feature does not exist. `param` is the first field.
    """

    def __init__(self, reasons: Sequence[InvalidRequest]) -> None:
        unsupported = [reason for reason in reasons if isinstance(reason, UnsupportedParameter)]
        others = [reason for reason in reasons if not isinstance(reason, UnsupportedParameter)]
        self.reasons = [*unsupported, *others]
        num_more = len(reasons) - MAX_REASONS
        texts = [str(reason) for reason in self.reasons[:MAX_REASONS]]
        more = [f"{num_more} more fields are wrong"] if num_more > 0 else []
        super().__init__("; and ".join([*texts, *more]), param=self.reasons[0].param)


class HttpError(NamedTuple):
    """An error, ready to be sent."""

    status: int
    headers: dict[str, str]
    reply: ErrorResponse


class ErrorForm(NamedTuple):
    """Form of errors in an API other than OpenAI's."""

    body: type[msgspec.Struct]
    """Struct of the body."""
    convert: Callable[[HttpError], msgspec.Struct]
    """Makes the body."""
    statuses: Mapping[int, int] = {}
    """Statuses that the API replaces by others of its own."""


def error_response(error: Exception, request_id: str) -> HttpError:
    """Return the answer to a request that ended with `error`.

    An exception that does not belong to the interface of the package is logged here, and not shown to the user.
    """
    first = error.reasons[0] if isinstance(error, InvalidFields) else error
    kind = next(kind for kind in type(first).__mro__ if kind in TABLE)
    rule = error.rule if isinstance(error, RefusedRequest) else TABLE[kind]
    message = str(error)
    if kind is Exception:
        logger.error("request %s: unexpected error", request_id, exc_info=error, extra={"request_id": request_id})
        message = f"internal error; the server's log has the cause under request id {request_id}"
    elif rule.status == 500:
        logger.warning("request %s failed: %s", request_id, message, extra={"request_id": request_id})
    reply = ErrorResponse(ErrorBody(message, rule.type, _param(error), rule.code))
    return HttpError(rule.status, _headers(error), reply)


def _param(error: Exception) -> str | None:
    if isinstance(error, InvalidRequest):
        return error.param
    return "model" if isinstance(error, UnknownModel) else None


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, RefusedRequest):
        return {**error.headers}
    return {"retry-after": str(error.retry_after)} if isinstance(error, Unavailable) else {}
