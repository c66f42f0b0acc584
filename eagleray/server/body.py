"""From the bytes of a request to a checked value, or an `InvalidRequest` that names the field."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from eagleray.errors import InvalidRequest
from eagleray.server.failures import BodyTooLarge

__all__ = ["UNSUPPORTED", "BodyDecoder", "Empty", "Null", "field_names"]

T = TypeVar("T")

UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
MISSING_FIELD = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
WHERE = re.compile(r"^(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)


UNSUPPORTED = "x-unsupported"
Null = Annotated[None, Meta(description="Not supported: null only.", extra_json_schema={UNSUPPORTED: True})]
Empty = Annotated[
    Annotated[list[Any], Meta(max_length=0)] | None,
    Meta(description="Not supported: null or [] only.", extra_json_schema={UNSUPPORTED: True}),
]
"""Types of fields whose feature does not exist here. Clients send them even when they want nothing of it."""


class BodyDecoder(Generic[T]):
    """Reads the bodies of one route: JSON objects that are a `kind`, a struct."""

    def __init__(self, kind: type[T], most_bytes: int) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._most_bytes = most_bytes

    async def read(self, request: Request) -> T:
        """The request's body. Raises `InvalidRequest`, or `BodyTooLarge` as soon as it is known to be."""
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._most_bytes:
            raise self._too_large()
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._most_bytes:
                raise self._too_large()
            chunks.append(chunk)
        return self.decode(b"".join(chunks))

    def decode(self, body: bytes) -> T:
        """The request in `body`. Raises `InvalidRequest`."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequest):  # raised by a struct's own check
                raise error.__cause__ from None
            raise self._explain(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the request's body is larger than {self._most_bytes} bytes, the most that this server accepts "
            "(its option `max_request_bytes`); send less"
        )

    def _explain(self, message: str) -> InvalidRequest:
        """msgspec says "Expected `int`, got `str` - at `$.max_tokens`"; say it in the user's terms."""
        match = WHERE.match(message)
        what, path = (match["what"], match["path"]) if match else (message, "")
        if unknown := UNKNOWN_FIELD.fullmatch(what):
            path = f"{path}.{unknown[1]}".lstrip(".")
            return InvalidRequest(
                f"`{path}` is not a field of this request, or it belongs to a feature that is not supported; leave it "
                "out (/openapi.json lists the fields of every route)",
                param=path,
            )
        if missing := MISSING_FIELD.fullmatch(what):
            path = f"{path}.{missing[1]}".lstrip(".")
            return InvalidRequest(f"`{path}` is missing", param=path)
        if not path:
            return InvalidRequest(f"the body: {what[0].lower()}{what[1:]}")
        unsupported, choices = self._hints
        name = path.split(".")[-1].split("[")[0]
        if name in unsupported:
            return InvalidRequest(f"`{path}` is not supported; leave it out", param=path)
        if name in choices and what.startswith("Invalid"):
            what = f"not a supported value; supported: {choices[name]}"
        what = f"a key: {what}" if match and match["key"] else what
        return InvalidRequest(f"`{path}`: {what[0].lower()}{what[1:]}", param=path)

    @functools.cached_property
    def _hints(self) -> tuple[set[str], dict[str, str]]:
        """Names of the fields that are not supported, and the values of those that admit only a few."""
        _, components = msgspec.json.schema_components([self._kind])
        properties = [item for part in components.values() for item in part.get("properties", {}).items()]
        unsupported = {name for name, schema in properties if UNSUPPORTED in schema}
        return unsupported, {name: ", ".join(values) for name, schema in properties if (values := _choices(schema))}


@contextlib.contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Inside, an `InvalidRequest` about a field becomes one about what `names` says it is called in this request."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise


def _choices(schema: dict[str, Any]) -> list[str]:
    """The values of a field that admits only a few."""
    nested = [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]
    return [*map(str, schema.get("enum", [])), *(value for part in nested for value in _choices(part))]
