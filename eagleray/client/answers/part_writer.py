"""Collects the parts of an answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from eagleray.client.answers.parts import AnswerPart, CallArguments, CallBegin, Content, Reasoning
from eagleray.client.answers.text_reader import WHITE_SPACE


class PartWriter:
    """Parts in their order. White space around calls belongs to no part: it is content only between content."""

    def __init__(self) -> None:
        self._parts: list[AnswerPart] = []
        self._held: list[str] = []
        """Text that is content if content follows: white space, and separators after a call."""
        self._num_calls = 0
        self._is_after_call = False
        self.has_arguments = False
        """Whether the call that began last has arguments already."""

    def content(self, text: str) -> None:
        """Add content. White space at its end is held until it is known what follows."""
        kept = text.rstrip(WHITE_SPACE)
        if kept:
            self._held.append(kept)
            self._flush()
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._parts.append(Reasoning(text))

    def separator(self, text: str) -> None:
        """Add text after a call, which is content unless another call or the end follows."""
        self._held.append(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin the next call."""
        self._held.clear()
        self._parts.append(CallBegin(self._num_calls, name, call_id))
        self._num_calls += 1
        self._is_after_call = True
        self.has_arguments = False

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the call that began last."""
        if text:
            self._parts.append(CallArguments(self._num_calls - 1, text))
            self.has_arguments = True

    def end(self) -> None:
        """End the answer."""
        if not self._is_after_call:
            self._flush()

    def take(self) -> list[AnswerPart]:
        """Return and forget the parts that were added since the last time, joined where the kind is the same."""
        parts, self._parts = self._parts, []
        return parts if len(parts) < 2 else join_parts(parts)

    def _flush(self) -> None:
        if self._held:
            self._parts.append(Content("".join(self._held)))
        self._held.clear()
        self._is_after_call = False


def join_parts(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Join the texts of parts of the same kind, and of the same call, that follow each other."""
    joined: list[AnswerPart] = []
    for _, group in itertools.groupby(parts, lambda part: (type(part), getattr(part, "call", None))):
        first, *others = group
        if isinstance(first, CallBegin):
            joined.extend((first, *others))
        else:
            text = "".join([first.text, *(part.text for part in others if not isinstance(part, CallBegin))])
            joined.append(first._replace(text=text))
    return joined
