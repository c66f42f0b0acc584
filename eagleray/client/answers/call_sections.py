"""Splits answers whose tool calls stand in a section, each with a header and JSON between markers of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from eagleray.client.answers.call_splitter import CALL_NAME, CallSplitter
from eagleray.client.answers.constraints import calls_in_text, calls_only, constant, sequence, tag
from eagleray.client.answers.formats import StructuralFormat
from eagleray.client.answers.marker_search import MarkerSearch
from eagleray.client.answers.text_reader import Reading, json_ends
from eagleray.client.answers.tools import ToolChoice


class SectionMarkers(NamedTuple):
    """Markers of a format. A call is `call_begin` HEADER `header_end` ARGUMENTS `call_end`.

    Fences stand around the arguments, if the format has them.
    """

    section_begin: str
    section_end: str
    call_begin: str
    header_end: str
    call_end: str
    fence_begin: str = ""
    fence_end: str = ""


class CallHeader(NamedTuple):
    """Name and id of a call."""

    name: str
    id: str | None = None


class SectionSplitter(CallSplitter):
    """Reads content and sections. A call without its section is a call too."""

    def __init__(self, markers: SectionMarkers) -> None:
        super().__init__()
        self._markers = markers
        self._begins = MarkerSearch(markers.section_begin, markers.call_begin)
        self._header_ends = MarkerSearch(markers.header_end, markers.call_end, markers.section_end)
        self._call_ends = MarkerSearch(markers.call_end, markers.section_end)
        fences = (markers.fence_end, f"\n{markers.fence_end}") if markers.fence_end else ()
        self._json_ends = json_ends(markers.call_end, markers.section_end, *fences)

    @abstractmethod
    def read_header(self, text: str) -> CallHeader:
        """Return the name and id in the text of a header. A name that cannot be one makes it no call."""

    def read(self) -> Reading[None]:
        while (begin := (yield from self.text.read_until(self._begins, self.parts.content))) is not None:
            self.text.start_record(begin)
            if begin == self._markers.section_begin:
                yield from self.text.read_space()
                begin = yield from self.text.take(self._markers.call_begin)
            while begin == self._markers.call_begin and (yield from self._read_call()):
                self.text.start_record()
                yield from self.text.read_space()
                begin = yield from self.text.take_end(self._markers.call_begin, self._markers.section_end)
            text = self.text.stop_record()
            if begin is None or begin == self._markers.call_begin:
                self.parts.content(text)

    def _read_call(self) -> Reading[bool]:
        """Read the rest of a call. Returns whether it was one; if not, its text is in the record."""
        yield from self.text.read_space()
        pieces: list[str] = []
        end = yield from self.text.read_until(self._header_ends, pieces.append)
        header = self.read_header("".join(pieces))
        if end != self._markers.header_end or not CALL_NAME.fullmatch(header.name):
            return False
        self.begin_call(header.name, header.id)
        yield from self.text.read_space()
        yield from self.text.take(self._markers.fence_begin)
        yield from self.read_written_arguments(self._call_ends, self._json_ends, self._markers.fence_end)
        if (yield from self.text.take(self._markers.call_end)) and not self.parts.has_arguments:
            self.parts.arguments("{}")
        return True


def constrain_section(
    calls: list[StructuralFormat], choice: ToolChoice, markers: SectionMarkers, separator: str = ""
) -> StructuralFormat | None:
    """Return the constraint for a section of calls with these formats; None if there are none.

    `separator` comes between calls that follow each other.
    """
    if not calls:
        return None
    begin, inside, end = markers.section_begin, calls_only(calls, choice, separator), markers.section_end
    if choice.mode == "required":
        return sequence(constant(begin), inside, constant(end))
    return calls_in_text([tag(begin, inside, end)], choice, begin)
