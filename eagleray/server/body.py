"""Decoding of request bodies: bytes become a checked struct, or an `InvalidRequest` that names the field.

`Reasons` collects everything that is wrong with a request. Holds no state of any request; driven by the handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from eagleray.config.serving import ServingConfig
from eagleray.errors import InvalidRequest
from eagleray.server.content_encoding import inflate, is_gzip
from eagleray.server.error_responses import BODY_TOO_LARGE, InvalidFields, RefusedRequest
from eagleray.server.field_fates import Fate
from eagleray.server.lenient_body import IgnoredFieldLog, LenientReader

T = TypeVar("T")

UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
OUT_OF_RANGE = "Number out of range"
MISSING_FIELD = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
WHERE = re.compile(r"^(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)


UNSUPPORTED = "x-unsupported"
Null = Annotated[None, Meta(description="Not supported: null only.", extra_json_schema={UNSUPPORTED: True})]
Empty = Annotated[
    Annotated[list[Any], Meta(max_length=0)] | None,
    Meta(description="Not supported: null or [] only.", extra_json_schema={UNSUPPORTED: True}),
]
"""Types of fields whose feature does not exist here. Clients send such fields even without using the feature."""
EmptyObject = Annotated[
    Annotated[dict[str, Any], Meta(max_length=0)] | None,
    Meta(description="Not supported: null or {} only.", extra_json_schema={UNSUPPORTED: True}),
]


IGNORED_FIELDS = "ignored_fields"
"""Key of a request's state for the value of the header with the names of ignored fields."""

LARGE_BODY_BYTES = 2**20
"""Size from which on the values of a body are counted before it is decoded."""

MAX_LENGTH_DIGITS = 20
"""Digits of a Content-Length that are read: a number with more is too large in any case."""

CONTAINER_WEIGHT = 4
"""Weight of a list or an object, in numbers or texts: it takes more memory, and Python's collector visits it."""


class BodyDecoder(Generic[T]):
    """Reads the bodies of one route, JSON objects in the form of the struct `kind`.

    Bounds each body by `options`; the protocol bounds the bytes of all bodies that are still arriving. `on_large` is
    called when a large body has arrived. With `fates`, the table of a route's other fields, a body that is not exactly
    of this form is read once more, field by field.
    """

    def __init__(
        self,
        kind: type[T],
        options: ServingConfig,
        on_large: Callable[[], None],
        *,
        fates: Mapping[str, Fate] | None = None,
        ignored_log: IgnoredFieldLog | None = None,
    ) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._lenient = None if fates is None else LenientReader(kind, fates, self._explain)
        self._ignored_log = ignored_log or IgnoredFieldLog()
        self._max_bytes = options.max_request_bytes
        self._max_values = options.max_request_tokens
        self._on_large = on_large
        self._inflating = asyncio.Lock()
        """Lock that lets one body be inflated at a time: inflated bytes are not counted as arriving ones are."""

    async def read(self, request: Request) -> T:
        """Return the request's body. Raises `InvalidRequest`, and `RefusedRequest` as soon as it is known too large.

        The names of fields that have no effect are left in the request's state, for the header of the answer.
        """
        body = await self.read_bytes(request)
        if len(body) < LARGE_BODY_BYTES:
            return self.decode(body, request.scope["state"])
        self._on_large()
        self._check_values(body)
        with _without_gc():
            return self.decode(body, request.scope["state"])

    async def read_bytes(self, request: Request) -> bytearray:
        """Return the bytes of the request's body, inflated.

        Raises `RefusedRequest` as soon as it is known too large, and `InvalidRequest` if it is not gzip as it says.
        """
        encoding = request.headers.get("content-encoding")
        has_gzip = encoding is not None and is_gzip(encoding)
        announced = request.headers.get("content-length", "")
        if announced.isascii() and announced.isdigit():
            self._check_length(int(announced[:MAX_LENGTH_DIGITS]))
        body = bytearray()
        async for chunk in request.stream():
            self._check_length(len(body) + len(chunk))
            body += chunk
        return await self._inflate(body) if has_gzip else body

    async def _inflate(self, data: bytearray) -> bytearray:
        """Inflate the body, in turns with other work."""
        body = bytearray()
        async with self._inflating:
            for piece in inflate(data, self._check_length):
                body += piece
                await asyncio.sleep(0)
        return body

    def convert(self, fields: Mapping[str, Any]) -> T:
        """Convert decoded fields; numbers may be given as texts. Raises `InvalidRequest`."""
        try:
            return msgspec.convert(fields, self._kind, strict=False)
        except msgspec.ValidationError as error:
            raise self._explain(str(error)) from None

    def decode(self, body: bytes | bytearray, state: dict[str, Any] | None = None) -> T:
        """Decode `body`. Raises `InvalidRequest`, and `RefusedBody` if fields of it are refused.

        `state`: the state of the request, which gets the names of ignored fields.
        """
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            message = str(error)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None
        is_object = not message.startswith("Expected") or WHERE.match(message)
        if self._lenient is None or message.startswith(OUT_OF_RANGE) or not is_object:
            raise self._explain(message)
        unknown = None
        with _explaining_json():
            if len(body) < LARGE_BODY_BYTES:
                fields = _object(msgspec.json.decode(body))
            else:
                fields, unknown = self._lenient.known_fields(body)
        reading = self._lenient.read(fields, unknown)
        if reading.ignored and state is not None:
            self._ignored_log.note(reading.ignored.names)
            state[IGNORED_FIELDS] = reading.ignored.header
        if reading.body is None or reading.reasons:
            raise RefusedBody(reading.reasons, reading.body)
        return reading.body

    def _check_length(self, num_bytes: int) -> None:
        """Raise `BodyTooLarge` if a body may not have this many bytes."""
        if num_bytes > self._max_bytes:
            raise RefusedRequest(
                f"the request's body is larger than {self._max_bytes} bytes, the most that this server accepts "
                "(its option `max_request_bytes`); send less",
                BODY_TOO_LARGE,
            )

    def _check_values(self, body: bytearray) -> None:
        """Raise `InvalidRequest` for a body whose values would take many times its size once decoded."""
        counts = {
            "commas": (body.count(b","), self._max_values),
            "brackets and braces": (body.count(b"[") + body.count(b"{"), self._max_values // CONTAINER_WEIGHT),
        }
        for name, (count, limit) in counts.items():
            if count > limit:
                raise InvalidRequest(
                    f"the body has {count} {name}, but this server decodes at most {limit} (its option "
                    f"`max_request_tokens` is {self._max_values}); send less"
                )

    def _explain(self, message: str, field: str = "") -> InvalidRequest:
        """Return the error in the user's terms for msgspec's "Expected `int`, got `str` - at `$.max_tokens`".

        `field`: the field that was converted, if it was not the whole body.
        """
        match = WHERE.match(message)
        what, path = (match["what"], match["path"]) if match else (message, "")
        path = f"{field}{'.' if field and path and path[0] != '[' else ''}{path}"
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
        schemas = self._schemas_at(path)
        if any(UNSUPPORTED in schema for schema in schemas):
            return InvalidRequest(f"`{path}` is not supported; leave it out", param=path)
        if what.startswith("Invalid") and (choices := [value for schema in schemas for value in _choices(schema)]):
            what = f"not a supported value; supported: {', '.join(choices)}"
        what = f"a key: {what}" if match and match["key"] else what
        return InvalidRequest(f"`{path}`: {what[0].lower()}{what[1:]}", param=path)

    def _schemas_at(self, path: str) -> list[dict[str, Any]]:
        """Return the JSON schemas of the field at `path`: several if it is in one of several structs."""
        (schema,), structs = self._schemas
        found = [schema]
        for name in path.split("."):
            properties = [part["properties"] for part in _parts(found, structs) if "properties" in part]
            found = [part[key] for part in properties if (key := name.split("[")[0]) in part]
        return found

    @functools.cached_property
    def _schemas(self) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
        """The schema of the body, and those of the structs in it by name."""
        return msgspec.json.schema_components([self._kind])


class Reasons:
    """Collects the reasons why one request is refused."""

    def __init__(self) -> None:
        self.found: list[InvalidRequest] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep an `InvalidRequest` that the block raises."""
        try:
            yield
        except InvalidFields as error:
            self.found += error.reasons
        except InvalidRequest as error:
            self.found.append(error)

    def check(self) -> None:
        """Raise one error for all reasons that were found, if any."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise InvalidFields(self.found)


class RefusedBody(InvalidFields):
    """A body some of whose fields are refused or wrong. `rest`: the others, or None without a required one."""

    def __init__(self, reasons: Sequence[InvalidRequest], rest: Any) -> None:
        super().__init__(reasons)
        self.rest = rest


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises `InvalidRequest`."""
    with _explaining_json():
        return _object(msgspec.json.decode(body))


def _object(decoded: Any) -> dict[str, Any]:
    if not isinstance(decoded, dict):
        raise InvalidRequest("the body must be a JSON object")
    return decoded


@contextlib.contextmanager
def _explaining_json() -> Iterator[None]:
    """Raise `InvalidRequest` for what makes a body undecodable in the block."""
    try:
        yield
    except msgspec.ValidationError:  # of a number; types are not checked here
        raise InvalidRequest("the body has a number that is out of range: it is larger than a float can be") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Switch Python's collector off, which would visit the hundreds of thousands of objects of a body repeatedly."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Give the fields of an `InvalidRequest` from inside the block the names that they have in `names`, if any."""
    try:
        yield
    except InvalidFields as error:
        raise InvalidFields([_renamed(reason, names) for reason in error.reasons]) from None
    except InvalidRequest as error:
        raise _renamed(error, names)  # noqa: B904 - the same error


def _renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    own = error.param
    if own is not None and own in names:
        error.param = names[own]
        error.args = (str(error).replace(f"`{own}`", f"`{error.param}`"), *error.args[1:])
    return error


def _parts(schemas: Iterable[dict[str, Any]], structs: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the schemas, and those of their alternatives and entries."""
    for schema in schemas:
        yield schema
        yield from _parts(_nested(schema), structs)
        if "$ref" in schema:
            yield structs[schema["$ref"].rpartition("/")[2]]


def _nested(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]


def _choices(schema: dict[str, Any]) -> list[str]:
    """Return the values of a field that admits only a few."""
    return [*map(str, schema.get("enum", [])), *(value for part in _nested(schema) for value in _choices(part))]
