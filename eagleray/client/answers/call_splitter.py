"""The base of splitters that find tool calls in an answer."""

from __future__ import annotations

import enum
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Container

from eagleray.client.answers.marker_search import MarkerSearch
from eagleray.client.answers.part_writer import PartWriter
from eagleray.client.answers.parts import AnswerPart
from eagleray.client.answers.text_reader import JSON_ENDS, WHITE_SPACE, Emit, JsonEnds, Reading, TextReader, discard

CALL_NAME = re.compile(r'[^\s"<>{}]+')
"""Names of functions, as formats have them that write a name without quotes."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_KEYS_OF_ARGUMENTS = ("arguments", "parameters")
_KEYS_OF_CALLS = ("name", "type", "id", *_KEYS_OF_ARGUMENTS)


class CallEnd(enum.Enum):
    """Outcome of reading a call."""

    COMPLETE = enum.auto()
    BROKEN = enum.auto()
    """The call has begun, and the text does not go on in the format."""
    NO_CALL = enum.auto()
    """The call has not begun, because it has no name."""


class CallSplitter(ABC):
    """Runs `read`, which reads the whole answer and waits inside for the text to come."""

    def __init__(self) -> None:
        self.text = TextReader()
        self.parts = PartWriter()
        self._reading = self.read()

    def push(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain after this further text."""
        self.text.push(text)
        next(self._reading, None)
        return self.parts.take()

    def finish(self) -> list[AnswerPart]:
        """Return the rest, when the answer has ended."""
        self.text.close()
        next(self._reading, None)
        self.parts.end()
        return self.parts.take()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read the answer to its end, and write its parts."""

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call, and forget its text so far."""
        self.text.stop_record()
        self.parts.begin_call(name, call_id)

    def read_broken(self, end: MarkerSearch) -> Reading[None]:
        """Read the rest of a broken call up to its end marker. If no arguments came before, it is the arguments."""
        yield from self.text.read_until(end, discard if self.parts.has_arguments else self.parts.arguments)

    def read_written_arguments(self, ends: MarkerSearch, json: JsonEnds, fence: str = "") -> Reading[None]:
        """Read arguments as they are written, before one of `ends` that is in no string of JSON, as `json` has them.

        White space on both sides, and a `fence` behind the arguments, is left out.
        """
        yield from self.text.read_space()
        yield from self.text.read_json(self.parts.arguments, json)
        rest: list[str] = []
        yield from self.text.read_before(ends, rest.append)
        self.parts.arguments("".join(rest).rstrip(WHITE_SPACE).removesuffix(fence).rstrip(WHITE_SPACE))

    def read_call_object(self, ends: JsonEnds = JSON_ENDS, names: Container[str] | None = None) -> Reading[CallEnd]:
        """Read a call that is a JSON object with `name` and `arguments` or `parameters`, in any order.

        With `names`, an object that has another name or further keys is no call, as where no marker tells calls
        from other JSON.
        """
        name: str | None = None
        early: list[str] = []  # arguments that come before the name
        has_arguments = False
        if not (yield from self.text.take("{")):
            return CallEnd.NO_CALL
        while (key := (yield from self._read_key())) is not None:
            if names is not None and key not in _KEYS_OF_CALLS:
                break
            if key in _KEYS_OF_ARGUMENTS and not has_arguments:
                has_arguments = True
                emit = early.append if name is None else self.parts.arguments
                is_complete = yield from self._read_arguments(emit, ends)
            else:
                pieces: list[str] = []
                is_complete = yield from self.text.read_json(pieces.append, ends)
                if key == "name" and name is None:
                    name = _string(pieces)
                    if not name or (names is not None and name not in names):
                        return CallEnd.NO_CALL
                    self.begin_call(name)
                    self.parts.arguments("".join(early))
            if not is_complete:
                break
        if name is None:
            return CallEnd.NO_CALL
        if key is not None or not (yield from self.text.take("}")):
            return CallEnd.BROKEN
        if not has_arguments:
            self.parts.arguments("{}")
        return CallEnd.COMPLETE

    def _read_key(self) -> Reading[str | None]:
        """Read the next key with its colon; None if none comes."""
        yield from self.text.read_space()
        yield from self.text.take(",")
        yield from self.text.read_space()
        pieces: list[str] = []
        if (yield from self.text.peek()) != '"' or not (yield from self.text.read_json(pieces.append)):
            return None
        yield from self.text.read_space()
        if not (yield from self.text.take(":")):
            return None
        yield from self.text.read_space()
        return _string(pieces)

    def _read_arguments(self, emit: Emit, ends: JsonEnds) -> Reading[bool]:
        """Emit the arguments of a call. Some models write the object in a JSON string, which is decoded."""
        if (yield from self.text.peek()) != '"':
            return (yield from self.text.read_json(emit, ends))
        pieces: list[str] = []
        is_complete = yield from self.text.read_json(pieces.append, ends)
        decoded = _string(pieces)
        emit(decoded if decoded is not None and isinstance(_decode(decoded), dict) else "".join(pieces))
        return is_complete


def _string(pieces: list[str]) -> str | None:
    """Decode a JSON string; None for another value, and for half of a surrogate pair, which no answer can send."""
    value = _decode("".join(pieces))
    return value if isinstance(value, str) and not _SURROGATE.search(value) else None


def _decode(text: str) -> object:
    """Decode JSON; None for other texts."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
