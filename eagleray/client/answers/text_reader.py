"""Reads the text of an answer while it grows."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

from eagleray.client.answers.marker_search import MarkerSearch

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A generator that yields whenever it needs text that has not come yet. Delegate to it with `yield from`."""

Emit = Callable[[str], object]
"""Takes pieces of text as they become certain."""

WHITE_SPACE = " \t\r\n"


def discard(text: str) -> None:
    """Take text that belongs to no part."""


_SPACE = re.compile(f"[{WHITE_SPACE}]*")
_IN_STRING = MarkerSearch('"', "\\")


class JsonEnds(NamedTuple):
    """Texts that end JSON values, or parts of them."""

    brackets: MarkerSearch
    scalars: MarkerSearch


def json_ends(*ends: str) -> JsonEnds:
    """Return ends for `TextReader.read_json`: besides its own end, a value ends, cut off, before any of `ends` that is
    not part of a string."""
    return JsonEnds(MarkerSearch(*'{}[]"', *ends), MarkerSearch(*",]}", *WHITE_SPACE, *ends))


JSON_ENDS = json_ends()


class TextReader:
    """Position in an answer. Every character is looked at a bounded number of times."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_complete = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def close(self) -> None:
        """Declare that no more text comes: readings return instead of waiting for it."""
        self._is_complete = True

    def start_record(self, text: str = "") -> None:
        """Record what is read from here on, after `text`."""
        self._record = [text]

    def stop_record(self) -> str:
        """Return the text read since `start_record`."""
        record, self._record = self._record or [], None
        return "".join(record)

    def rest(self) -> str:
        """Read the text that has come."""
        return self._read_to(len(self._text))

    def peek(self) -> Reading[str]:
        """Return the next character; "" at the end."""
        while self._position == len(self._text) and not self._is_complete:
            yield
        return self._text[self._position : self._position + 1]

    def take(self, *texts: str) -> Reading[str | None]:
        """Read the longest of the texts that comes next; None if another text comes."""
        longest = max(map(len, texts))
        while not self._is_complete:
            coming = self._text[self._position : self._position + longest]
            if not any(len(coming) < len(text) and text.startswith(coming) for text in texts):
                break
            yield
        found = max((text for text in texts if self._text.startswith(text, self._position)), key=len, default=None)
        if found is not None:
            self._read_to(self._position + len(found))
        return found

    def take_end(self, *texts: str) -> Reading[str | None]:
        """Read the longest of the texts that comes next, or the beginning of one if the text was cut off there; None if
        another text comes. For markers that end a call: a piece of one is neither content nor a part of the call."""
        found = yield from self.take(*texts)
        rest = self._text[self._position :]
        if found is None and rest and any(text.startswith(rest) for text in texts):
            found = self.rest()
        return found

    def read_space(self) -> Reading[str]:
        """Read white space, which may be none."""
        pieces = []
        while True:
            space = _SPACE.match(self._text, self._position)
            assert space is not None
            pieces.append(self._read_to(space.end()))
            if (yield from self.peek()) not in WHITE_SPACE or self._is_complete:
                return "".join(pieces)

    def read_until(self, markers: MarkerSearch, emit: Emit) -> Reading[str | None]:
        """Emit the text before the next marker. Read the marker too and return it; None if the text ends before one."""
        marker = yield from self.read_before(markers, emit)
        if marker is not None:
            self._read_to(self._position + len(marker))
        return marker

    def read_before(self, markers: MarkerSearch, emit: Emit) -> Reading[str | None]:
        """Emit the text before the next marker and return the marker, which is not read; None if the text ends."""
        while True:
            end, marker = markers.find(self._text, self._position, self._is_complete)
            if end > self._position:
                emit(self._read_to(end))
            if marker is not None or self._is_complete:
                return marker
            yield

    def read_json(self, emit: Emit, ends: JsonEnds = JSON_ENDS) -> Reading[bool]:
        """Emit one JSON value as it is written, by its brackets and strings: it isn't parsed further.

        Returns whether the value is complete. It is cut off where the text ends, or before one of `ends`.
        """
        first = yield from self.peek()
        if first in ("", *"]},:"):
            return False
        if first not in ("{", "[", '"'):
            return (yield from self.read_before(ends.scalars, emit)) in (*",]}", *WHITE_SPACE)
        depth = 0
        while True:
            marker = yield from self.read_before(ends.brackets, emit)
            if marker is None or marker not in '{}[]"':
                return False
            emit(self._read_to(self._position + 1))
            if marker == '"' and not (yield from self._read_string(emit)):
                return False
            depth += (marker in "{[") - (marker in "}]")
            if depth == 0:
                return True

    def _read_string(self, emit: Emit) -> Reading[bool]:
        """Emit the rest of a string with its closing quote, and return whether the quote came."""
        while (marker := (yield from self.read_until(_IN_STRING, emit))) is not None:
            emit(marker)
            if marker == '"':
                return True
            if not (yield from self.peek()):
                return False
            emit(self._read_to(self._position + 1))  # the character after the backslash, which ends nothing
        return False

    def _read_to(self, end: int) -> str:
        text = self._text[self._position : end]
        self._position = end
        if self._record is not None:
            self._record.append(text)
        return text
