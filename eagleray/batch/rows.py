"""The lines of batch files: requests in, answers out."""

from __future__ import annotations

from typing import Any

import msgspec

from eagleray.errors import InvalidRequest

BATCH_URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
)
"""Routes that rows may name. Routes that steer the instance would act on the other rows."""

MAX_CUSTOM_ID_CHARS = 1024

DUPLICATE = "duplicate_custom_id"
"""Code of the error of a row that has the `custom_id` of an earlier one."""


class RowError(msgspec.Struct, frozen=True):
    """Reason why a row has no answer, or the error of its answer."""

    code: str | None
    message: str


class RowResponse(msgspec.Struct, frozen=True):
    """The answer that a server would have given."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output."""

    id: str
    """Id of the row of the input, see `row_id`."""
    custom_id: str | None
    response: RowResponse | None
    error: RowError | None


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the input. Further fields are ignored."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"

    def __post_init__(self) -> None:
        if not 0 < len(self.custom_id) <= MAX_CUSTOM_ID_CHARS:
            raise ValueError(f"`custom_id` must have 1 to {MAX_CUSTOM_ID_CHARS} characters")
        if self.method != "POST":
            raise ValueError(f"`method` must be POST, but it is {self.method[:20]!r}")
        if self.url not in BATCH_URLS:
            raise ValueError(f"`url` must be one of {', '.join(BATCH_URLS)}, but it is {self.url[:80]!r}")
        if self.body.get("stream"):
            raise ValueError("`stream` must be false: the output has whole answers")


def row_id(number: int) -> str:
    """Return the id of the row in this line of the input, counted from 1."""
    return f"batch_req_{number}"


def parse_row(line: bytes, *, max_bytes: int) -> BatchRow:
    """Decode a line. Raises `InvalidRequest`."""
    if len(line) > max_bytes:
        raise InvalidRequest(f"the row has more than {max_bytes} bytes")
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the row is not a request of a batch: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the row is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the row is nested too deeply") from None


def custom_id_of(line: bytes) -> str | None:
    """Return the `custom_id` of a row that is wrong, if it can be read."""
    try:
        return _ID_DECODER.decode(line).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class _OnlyCustomId(msgspec.Struct):
    custom_id: str


_ID_DECODER = msgspec.json.Decoder(_OnlyCustomId)
_DECODER = msgspec.json.Decoder(BatchRow)
