"""Formats of reasoning that put it between two markers, at the beginning of the answer: most formats are of this kind.

The start marker is a part of the prompt or written by the model; some templates leave it out altogether.
"""

from __future__ import annotations

import re

import msgspec

from eagleray.client.answers.marker_search import MarkerSearch
from eagleray.client.answers.parts import AnswerPart, Reasoning, Splitter

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
        self._has_begun = False
        self._pending = ""
        """Text that may turn out to be a marker, or white space that belongs to one."""

    def push(self, text: str) -> list[AnswerPart]:
        self._pending += text
        if not self._has_begun and not self._begin():
            return []
        parts = self._split() if self._is_open else []
        return parts if self._is_open else [*parts, *self._pass_on()]

    def finish(self) -> list[AnswerPart]:
        parts = self._reasoning(self._pending) if self._is_open else self._pass_on()
        return [*parts, *self._rest.finish()]

    def _begin(self) -> bool:
        """Find out how the answer begins. Returns whether that is certain."""
        start, begun = self._format.start, self._pending.lstrip()
        if begun.startswith(start):
            self._is_open = True
            self._pending = begun.removeprefix(start)
        elif start.startswith(begun):
            return False
        self._has_begun = True
        return True

    def _split(self) -> list[AnswerPart]:
        """Return the reasoning up to its end, or as far as it is certain."""
        found = self._ends.find(self._pending)
        if found.marker is None:
            certain = self._pending[: found.end]
            return _parts(self._take(len(certain.rstrip() if self._format.strips_end else certain)))
        self._is_open = False
        parts = self._reasoning(self._take(found.end))
        if found.marker == self._format.end:
            self._take(len(found.marker))
        return parts

    def _pass_on(self) -> list[AnswerPart]:
        """Return the parts of the text after the reasoning."""
        return self._rest.push(self._take(len(self._pending))) if self._pending else []

    def _reasoning(self, text: str) -> list[AnswerPart]:
        """Return the last text of the reasoning."""
        return _parts(text.rstrip() if self._format.strips_end else text)

    def _take(self, num_chars: int) -> str:
        """Remove and return the beginning of the pending text."""
        taken, self._pending = self._pending[:num_chars], self._pending[num_chars:]
        return taken


def _parts(text: str) -> list[AnswerPart]:
    return [Reasoning(text)] if text else []
