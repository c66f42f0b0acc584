"""The items of an answer of /v1/responses while they are made, and the events of a stream about them.

A whole answer is made by the same `OutputItems`, whose events are then not sent.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator

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
        self._name = name
        self._next_number = next_number
        self._make_call_id = make_call_id
        self._is_open = False
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
                    yield from self._add_reasoning(text)
                case CallBegin(_, name, call_id):
                    yield from self._open_call(name, call_id or self._make_call_id())
                case CallArguments(_, text):
                    self._take_logprobs(text)
                    yield from self._add_arguments(text)

    def push_undivided(self, text: str, logprobs: list[ChatTokenLogprob]) -> Iterator[AnyResponseEvent]:
        """Yield the events for more text of an answer that is content alone."""
        if text or logprobs:
            yield from self._add_text(text, logprobs)

    def _take_logprobs(self, text: str) -> list[ChatTokenLogprob]:
        """Remove and return the log-probabilities of the tokens of a part, and remove those of the tokens before it,
        which are markers."""
        wanted, ends = text.encode(), [*itertools.accumulate(len(one.bytes or ()) for one in self._logprobs)]
        start = b"".join(bytes(one.bytes or ()) for one in self._logprobs).find(wanted)
        if start < 0:
            return []  # the format writes it in another way
        first, end = bisect_right(ends, start), bisect_left(ends, start + len(wanted)) + 1
        taken, self._logprobs = self._logprobs[first:end], self._logprobs[end:]
        return taken

    def _add_text(self, text: str, logprobs: list[ChatTokenLogprob]) -> Iterator[AnyResponseEvent]:
        yield from self.open_message()
        item, index = self.items[-1], len(self.items) - 1
        assert isinstance(item, OutputMessage)
        (part,) = item.content
        part.text += text
        part.logprobs = [*part.logprobs, *logprobs]
        yield OutputTextDelta(
            sequence_number=self._next_number(), item_id=item.id, output_index=index, delta=text, logprobs=logprobs
        )

    def open_message(self) -> Iterator[AnyResponseEvent]:
        """Yield the events that open a message, unless one is open."""
        if not (self._is_open and isinstance(self.items[-1], OutputMessage)):
            name = self._item_name("msg")
            yield from self._open(OutputMessage(id=name, status="in_progress", content=[]))
            yield self._part_added(OutputText(text=""))
            self.items[-1] = OutputMessage(id=name, status="in_progress", content=[OutputText(text="")])

    def finish(self, status: ItemState, weight_versions: WeightVersionsField) -> Iterator[AnyResponseEvent]:
        """Yield the events that close the last item, at the end of the answer, in this state."""
        if self._logprobs and self._is_open and isinstance(self.items[-1], OutputMessage):
            yield from self._add_text("", self._logprobs)
        if self.items:
            self.items[-1].weight_versions = weight_versions
        yield from self._close(status)

    def _add_reasoning(self, text: str) -> Iterator[AnyResponseEvent]:
        if not (self._is_open and isinstance(self.items[-1], ReasoningItem)):
            name = self._item_name("rs")
            yield from self._open(ReasoningItem(id=name, status="in_progress", content=[]))
            yield self._part_added(ReasoningText(text=""))
            self.items[-1] = ReasoningItem(id=name, status="in_progress", content=[ReasoningText(text="")])
        item, index = self.items[-1], len(self.items) - 1
        assert isinstance(item, ReasoningItem)
        item.content[0].text += text
        yield ReasoningTextDelta(sequence_number=self._next_number(), item_id=item.id, output_index=index, delta=text)

    def _open_call(self, name: str, call_id: str) -> Iterator[AnyResponseEvent]:
        item_id = self._item_name("fc")
        yield from self._open(FunctionCallItem(id=item_id, status="in_progress", call_id=call_id, name=name))
        self.items[-1] = FunctionCallItem(id=item_id, status="in_progress", call_id=call_id, name=name)

    def _add_arguments(self, text: str) -> Iterator[AnyResponseEvent]:
        item, index = self.items[-1], len(self.items) - 1
        assert isinstance(item, FunctionCallItem)
        item.arguments += text
        yield FunctionArgumentsDelta(
            sequence_number=self._next_number(), item_id=item.id, output_index=index, delta=text
        )

    def _item_name(self, prefix: str) -> str:
        number = len(self.items)
        return f"{prefix}_{self._name}" if number == 0 else f"{prefix}_{self._name}_{number}"

    def _open(self, item: AnyOutputItem) -> Iterator[AnyResponseEvent]:
        yield from self._close("completed")
        self.items.append(item)
        self._is_open = True
        yield OutputItemAdded(sequence_number=self._next_number(), output_index=len(self.items) - 1, item=item)

    def _part_added(self, part: OutputText | ReasoningText) -> AnyResponseEvent:
        index = len(self.items) - 1
        return ContentPartAdded(
            sequence_number=self._next_number(), item_id=self.items[-1].id, output_index=index, part=part
        )

    def _close(self, status: ItemState) -> Iterator[AnyResponseEvent]:
        if not self._is_open:
            return
        self._is_open = False
        item, index, number = self.items[-1], len(self.items) - 1, self._next_number
        item.status = status
        if isinstance(item, FunctionCallItem):
            yield FunctionArgumentsDone(
                sequence_number=number(),
                item_id=item.id,
                output_index=index,
                name=item.name,
                arguments=item.arguments,
            )
        else:
            (part,) = item.content
            if isinstance(part, OutputText):
                yield OutputTextDone(
                    sequence_number=number(),
                    item_id=item.id,
                    output_index=index,
                    text=part.text,
                    logprobs=part.logprobs,
                )
            else:
                yield ReasoningTextDone(sequence_number=number(), item_id=item.id, output_index=index, text=part.text)
            yield ContentPartDone(sequence_number=number(), item_id=item.id, output_index=index, part=part)
        yield OutputItemDone(sequence_number=number(), output_index=index, item=item)
