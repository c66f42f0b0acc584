"""Formats of reasoning that put it between two markers, at the beginning of the answer: most formats are of this kind.

The start marker is a part of the prompt or written by the model; some templates leave it out altogether.
"""

from __future__ import annotations

import re

import msgspec

from eagleray.client.answers.marker_search import MarkerSearch
from eagleray.client.answers.part_writer import join_parts
from eagleray.client.answers.parts import AnswerPart, Reasoning, Splitter
from eagleray.client.answers.text_reader import WHITE_SPACE, Reading, TextReader

TURN_MARKER = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>|\[/?INST\]|<(?:start|end)_of_turn>|<seed:[be]os>|</?s>")
"""Tokens between the messages of a prompt, in the spellings of published chat templates."""


class MarkedReasoning(msgspec.Struct, frozen=True, kw_only=True):
    """A `ReasoningFormat` with two markers; see there for the fields without a description."""

    name: str
    start: str = "<think>"
    end: str = "</think>"
    template_markers: tuple[str, ...]
    """Texts that are all in a chat template whose model reasons in this format."""
    is_implied: bool = False
    """Whether an answer in a conversation begins with reasoning, even without a marker, unless the prompt has closed
    it."""
    strips_end: bool = False
    """Whether white space at the end of the reasoning belongs to the format."""
    end_prefix: str = ""
    interrupts: tuple[str, ...] = ()
    answer_header: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """See `ReasoningFormat.markers`."""
        return (self.start, self.end)

    def fits_template(self, template: str) -> bool:
        """See `ReasoningFormat.fits_template`."""
        return all(marker in template for marker in self.template_markers)

    def begins_reasoning(self, prompt: str) -> bool:
        """See `ReasoningFormat.begins_reasoning`. Without a marker in the turn that the answer continues, the format
        decides."""
        marker = self._last_marker(prompt)
        return self.is_implied and bool(TURN_MARKER.search(prompt)) if marker is None else marker == self.start

    def may_begin_reasoning(self, prompt: str) -> bool:
        """See `ReasoningFormat.may_begin_reasoning`."""
        return self._last_marker(prompt) != self.end

    def splitter(self, prompt: str, rest: Splitter) -> Splitter:
        """See `ReasoningFormat.splitter`."""
        if not self.may_begin_reasoning(prompt):
            return rest
        return _MarkedSplitter(self, rest, is_open=self.begins_reasoning(prompt))

    def _last_marker(self, prompt: str) -> str | None:
        """Return the last marker in the turn that the answer continues."""
        started, ended = prompt.rfind(self.start), prompt.rfind(self.end)
        last = max(started, ended)
        if last == -1 or TURN_MARKER.search(prompt, last):
            return None
        return self.start if started > ended else self.end


class _MarkedSplitter(Splitter):
    """`is_open`: the answer begins with reasoning, whether or not it has a start marker."""

    def __init__(self, format: MarkedReasoning, rest: Splitter, *, is_open: bool) -> None:
        self._format = format
        self._ends = MarkerSearch(format.end, *format.interrupts)
        self._rest = rest
        self._is_open = is_open
        self._text = TextReader()
        self._parts: list[AnswerPart] = []
        self._held: list[str] = []
        """White space that is reasoning if more reasoning follows."""
        self._reading: Reading[None] | None = self._read()
        """None after the reasoning."""

    def push(self, text: str) -> list[AnswerPart]:
        if self._reading is None:
            return self._rest.push(text)
        self._text.push(text)
        return self._read_on(self._reading)

    def finish(self) -> list[AnswerPart]:
        self._text.close()
        parts = [] if self._reading is None else self._read_on(self._reading)
        return [*parts, *self._rest.finish()]

    def _read_on(self, reading: Reading[None]) -> list[AnswerPart]:
        """Return the parts that are certain after further text."""
        next(reading, None)
        parts, self._parts = self._parts, []
        return join_parts(parts)

    def _read(self) -> Reading[None]:
        """Read the reasoning, and pass on the text that came after it."""
        space = yield from self._text.read_space()
        has_start = (yield from self._text.take(self._format.start)) is not None
        if not has_start and self._is_open:
            self._add_reasoning(space)
        if has_start or self._is_open:
            yield from self._text.read_before(self._ends, self._add_reasoning)
            yield from self._text.take(self._format.end)
            space = ""
        self._reading = None
        if after := space + self._text.rest():
            self._parts += self._rest.push(after)

    def _add_reasoning(self, text: str) -> None:
        """Add reasoning. White space at its end is held if it may belong to the format."""
        kept = text.rstrip(WHITE_SPACE) if self._format.strips_end else text
        if kept:
            self._parts.append(Reasoning("".join((*self._held, kept))))
            self._held.clear()
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])
