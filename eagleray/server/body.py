"""From the bytes of a request to a checked value, or an `InvalidRequest` that names the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from eagleray.errors import InvalidRequest
from eagleray.server.failures import BodyTooLarge

__all__ = ["Unsupported", "decode", "read_body"]

T = TypeVar("T")

UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
MISSING_FIELD = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
WHERE = re.compile(r"^(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)


class Unsupported(msgspec.Struct, kw_only=True):
    """Base of structs whose fields name features that do not exist here.

    Clients send such fields even when they want nothing of them: the types admit only the values that mean that.
    """


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The whole body; raises `BodyTooLarge` as soon as it is known to be longer than `most_bytes`."""
    too_large = BodyTooLarge(
        f"the request's body is larger than {most_bytes} bytes, the most that this server accepts "
        "(its option `max_request_bytes`); send less"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most_bytes:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The request in `body`. Raises `InvalidRequest`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidRequest):  # raised by a struct's own check
            raise error.__cause__ from None
        raise _explain(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _explain(message: str, kind: type) -> InvalidRequest:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`"; say it in the user's terms."""
    match = WHERE.match(message)
    what, path = (match["what"], match["path"]) if match else (message, "")
    if unknown := UNKNOWN_FIELD.fullmatch(what):
        path = f"{path}.{unknown[1]}".lstrip(".")
        return InvalidRequest(
            f"`{path}` is not a field of this request, or of a feature that is not supported; leave it out "
            "(/openapi.json lists the fields of every route)",
            param=path,
        )
    if missing := MISSING_FIELD.fullmatch(what):
        path = f"{path}.{missing[1]}".lstrip(".")
        return InvalidRequest(f"`{path}` is missing", param=path)
    if not path:
        return InvalidRequest(f"the body: {what[0].lower()}{what[1:]}")
    field = re.split(r"[.\[]", path)[0]
    if field in _unsupported(kind):
        return InvalidRequest(f"`{field}` is not supported; leave it out", param=field)
    what = f"a key: {what}" if match and match["key"] else what
    return InvalidRequest(f"`{path}`: {what[0].lower()}{what[1:]}", param=path)


def _unsupported(kind: type) -> set[str]:
    markers = [base for base in kind.__mro__ if Unsupported in base.__bases__]
    return {field.name for marker in markers for field in msgspec.structs.fields(marker)}
