"""The items of an answer of /v1/responses while they are made, and the events of a stream about them.

A whole answer is made by the same `OutputItems`, whose events are then not sent.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from eagleray.client.answers.parts import AnswerPart, CallArguments, CallBegin, Content, Reasoning
from eagleray.server.generation import WeightVersionsField
from eagleray.server.logprobs import ChatTokenLogprob
from eagleray.server.openai.responses_api.response import (
    AnyOutputItem,
    AnyResponseEvent,
    ContentPartAdded,
    ContentPartDone,
    FunctionArgumentsDelta,
    FunctionArgumentsDone,
    FunctionCallItem,
    ItemState,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
)


class OutputItems:
    """Items in order; only the last one may be open. `name`: a unique part of their ids. `next_number`: returns the
    number of the next event. `make_call_id`: returns an id for a call that has none."""

    def __init__(self, name: str, next_number: Callable[[], int], make_call_id: Callable[[], str]) -> None:
        self.items: list[AnyOutputItem] = []
        """Items that were opened; each is complete when it is closed."""
        self._name = name
        self._next_number = next_number
        self._make_call_id = make_call_id
        self._opened: type[AnyOutputItem] | None = None
        """Type of the open item."""
        self._texts: list[str] = []
        """Text of the open item, in pieces."""
        self._shown_logprobs: list[ChatTokenLogprob] = []
        """Log-probabilities of the tokens of the open message."""
        self._logprobs: list[ChatTokenLogprob] = []
        """Log-probabilities of tokens whose text is not a part of an item yet."""

    def push(self, parts: Iterable[AnswerPart], logprobs: Iterable[ChatTokenLogprob]) -> Iterator[AnyResponseEvent]:
        """Yield the events for further parts. `logprobs`: of their tokens; only messages show them."""
        self._logprobs += logprobs
        for part in parts:
            match part:
                case Content(text):
                    yield from self._add_text(text, self._take_logprobs(text))
                case Reasoning(text):
                    self._take_logprobs(text)
                    if self._opened is not ReasoningItem:
                        item = ReasoningItem(id=self._item_id("rs"), status="in_progress", content=[])
                        yield from self._open(item, ReasoningText(text=""))
                    self._texts.append(text)
                    yield ReasoningTextDelta(delta=text, **self._place())
                case CallBegin(_, name, call_id):
                    call_id = call_id or self._make_call_id()
                    item_id = self._item_id("fc")
                    yield from self._open(
                        FunctionCallItem(id=item_id, status="in_progress", call_id=call_id, name=name)
                    )
                case CallArguments(_, text):
                    self._texts.append(text)
                    yield FunctionArgumentsDelta(delta=text, **self._place())

    def push_undivided(self, text: str, logprobs: list[ChatTokenLogprob]) -> Iterator[AnyResponseEvent]:
        """Yield the events for more text of an answer that is content alone."""
        if text or logprobs:
            yield from self._add_text(text, logprobs)

    def open_message(self) -> Iterator[AnyResponseEvent]:
        """Yield the events that open a message, unless one is open."""
        if self._opened is not OutputMessage:
            item = OutputMessage(id=self._item_id("msg"), status="in_progress", content=[])
            yield from self._open(item, OutputText(text=""))

    def finish(self, status: ItemState, weight_versions: WeightVersionsField) -> Iterator[AnyResponseEvent]:
        """Yield the events that close the last item, at the end of the answer, in this state."""
        if self._logprobs and self._opened is OutputMessage:
            yield from self._add_text("", self._logprobs)
        yield from self._close(status, weight_versions)

    def _add_text(self, text: str, logprobs: list[ChatTokenLogprob]) -> Iterator[AnyResponseEvent]:
        yield from self.open_message()
        self._texts.append(text)
        self._shown_logprobs += logprobs
        yield OutputTextDelta(delta=text, logprobs=logprobs, **self._place())

    def _take_logprobs(self, text: str) -> list[ChatTokenLogprob]:
        """Remove and return the log-probabilities of the tokens of a text, and remove those of the tokens before it,
        which are markers and calls."""
        if not self._logprobs:
            return []
        wanted, ends = text.encode(), [*itertools.accumulate(len(one.bytes or ()) for one in self._logprobs)]
        start = b"".join(bytes(one.bytes or ()) for one in self._logprobs).find(wanted)
        if start < 0:
            return []  # the format has put the text together from other pieces
        first, end = bisect_right(ends, start), bisect_left(ends, start + len(wanted)) + 1
        taken, self._logprobs = self._logprobs[first:end], self._logprobs[end:]
        return taken

    def _item_id(self, prefix: str) -> str:
        number = len(self.items)
        return f"{prefix}_{self._name}" if number == 0 else f"{prefix}_{self._name}_{number}"

    def _place(self) -> dict[str, Any]:
        """Return the fields of an event about the last item."""
        return {
            "sequence_number": self._next_number(),
            "item_id": self.items[-1].id,
            "output_index": len(self.items) - 1,
        }

    def _open(self, item: AnyOutputItem, part: OutputText | ReasoningText | None = None) -> Iterator[AnyResponseEvent]:
        """Yield the events that open an item, with its part unless it is a call."""
        yield from self._close("completed")
        self.items.append(item)
        self._opened, self._texts, self._shown_logprobs = type(item), [], []
        yield OutputItemAdded(sequence_number=self._next_number(), output_index=len(self.items) - 1, item=item)
        if part is not None:
            yield ContentPartAdded(part=part, **self._place())

    def _close(self, status: ItemState, weight_versions: WeightVersionsField = UNSET) -> Iterator[AnyResponseEvent]:
        """Yield the events that close the open item, which is replaced by the complete one."""
        if self._opened is None:
            return
        self._opened = None
        text, item = "".join(self._texts), self.items[-1]
        part: OutputText | ReasoningText | None = None
        match item:
            case OutputMessage():
                part = OutputText(text=text, logprobs=self._shown_logprobs)
                yield OutputTextDone(text=text, logprobs=part.logprobs, **self._place())
                item = msgspec.structs.replace(item, content=[part])
            case ReasoningItem():
                part = ReasoningText(text=text)
                yield ReasoningTextDone(text=text, **self._place())
                item = msgspec.structs.replace(item, content=[part])
            case FunctionCallItem(name=name):
                yield FunctionArgumentsDone(name=name, arguments=text, **self._place())
                item = msgspec.structs.replace(item, arguments=text)
        if part is not None:
            yield ContentPartDone(part=part, **self._place())
        item.status, item.weight_versions = status, weight_versions
        self.items[-1] = item
        yield OutputItemDone(sequence_number=self._next_number(), output_index=len(self.items) - 1, item=item)
