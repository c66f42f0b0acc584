"""Thinking that comes before an answer: free until its budget is used. A grammar may follow it.

The state of a `ThinkingMatcher` is a function of the tokens that it has accepted, like that of the grammar's matcher.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from copy import copy

from eagleray.grammars.matcher import Matcher, TokenMask, allow, allow_only, forbid
from eagleray.messages.thinking import Thinking


class _Phase(enum.Enum):
    OPENING = enum.auto()
    """The first tokens, as long as they may become a start marker."""
    THINKING = enum.auto()
    HEADER = enum.auto()
    ANSWER = enum.auto()


class ThinkingMatcher(Matcher):
    """Follows the thinking of a completion, then the matcher of its answer; `answer` None allows any."""

    def __init__(self, thinking: Thinking, answer: Matcher | None) -> None:
        self._thinking = thinking
        self._answer = answer
        self._phase = _Phase.OPENING
        self._count = 0
        """Number of tokens in this phase."""
        self._last: deque[int] = deque(maxlen=max(map(len, (thinking.end, *thinking.starts))))
        """Last tokens of this phase, which may be a marker."""
        self._last_of_ends = {thinking.end[-1], *thinking.interrupts}
        """Tokens that may end the thinking: few, so that long ones are replayed quickly."""

    @property
    def failure(self) -> str | None:
        return None if self._answer is None else self._answer.failure

    @property
    def is_complete(self) -> bool:
        """See `Matcher.is_complete`. Without a grammar no text is, because tokens of any kind may follow."""
        return self._phase is _Phase.ANSWER and self._answer is not None and self._answer.is_complete

    def fill_mask(self, mask: TokenMask) -> None:
        """See `Matcher.fill_mask`."""
        match self._phase:
            case _Phase.OPENING if not self._thinking.is_open:
                self._fill_opening(mask)
            case _Phase.OPENING | _Phase.THINKING:
                self._fill_thinking(mask)
            case _Phase.HEADER:
                allow_only(mask, [self._thinking.answer_header[self._count]])
            case _Phase.ANSWER:
                self._fill_answer(mask)

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher.accept`. An end-of-sequence token that does not end the thinking is a token of it."""
        for index, token_id in enumerate(token_ids):
            if self._phase is _Phase.ANSWER:
                self._accept_answer(token_ids[index:])
                return
            self._count += 1
            self._last.append(token_id)
            if self._phase is not _Phase.THINKING or token_id in self._last_of_ends:
                self._advance(tuple(self._last))

    def copy(self) -> ThinkingMatcher:
        """See `Matcher.copy`."""
        copied = copy(self)
        copied._answer = None if self._answer is None else self._answer.copy()
        copied._last = self._last.copy()
        return copied

    def _advance(self, last: tuple[int, ...]) -> None:
        """Go on after a token of a phase before the answer."""
        thinking = self._thinking
        match self._phase:
            case _Phase.OPENING if last in thinking.starts:
                self._enter(_Phase.THINKING)
            case _Phase.OPENING if self._next_of_starts():
                pass
            case _Phase.OPENING if thinking.is_open:
                self._phase = _Phase.THINKING  # which these tokens belong to
                self._advance(last)
            case _Phase.OPENING:
                self._enter(_Phase.ANSWER)
                self._accept_answer(last)
            case _Phase.THINKING if last[-len(thinking.end) :] == thinking.end:
                self._enter(_Phase.HEADER if thinking.answer_header else _Phase.ANSWER)
            case _Phase.THINKING if last[-1] in thinking.interrupts:
                self._enter(_Phase.ANSWER)
            case _Phase.HEADER if self._count == len(thinking.answer_header):
                self._enter(_Phase.ANSWER)

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._count = 0
        self._last.clear()

    def _next_of_starts(self) -> list[int]:
        """Return the tokens that continue a start marker."""
        begun = tuple(self._last)
        return [start[len(begun)] for start in self._thinking.starts if start[: len(begun)] == begun != start]

    def _fill_opening(self, mask: TokenMask) -> None:
        """Allow the start markers, and at first also the answer. A marker that has begun is completed, because the
        matcher of the answer does not have its tokens."""
        if self._answer is None or (self._count == 0 and not self._thinking.is_required):
            self._fill_answer(mask)
            allow(mask, self._next_of_starts())
        else:
            allow_only(mask, self._next_of_starts())

    def _fill_thinking(self, mask: TokenMask) -> None:
        thinking = self._thinking
        if thinking.budget is not None and self._count >= thinking.budget:
            first = self._count - thinking.budget
            allow_only(mask, thinking.forced_end[first : first + 1])  # none after more tokens than may be replayed
        else:
            mask.fill(-1)
            forbid(mask, thinking.forbidden)

    def _fill_answer(self, mask: TokenMask) -> None:
        if self._answer is None:
            mask.fill(-1)
        else:
            self._answer.fill_mask(mask)

    def _accept_answer(self, token_ids: Sequence[int]) -> None:
        if self._answer is not None:
            self._answer.accept(token_ids)
