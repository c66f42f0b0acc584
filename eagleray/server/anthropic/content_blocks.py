"""The blocks of an answer of /v1/messages while they are made, and the events of a stream about them.

A whole answer is made by the same `ContentBlocks`, whose events are then not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from eagleray.client.answers.parts import AnswerPart, CallArguments, CallBegin, Content, Reasoning
from eagleray.server.anthropic.response import (
    AnyMessageEvent,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)

BROKEN_INPUT = "INVALID_JSON"
"""Name under which an input that is no JSON object is delivered as a text, as Anthropic's documents recommend."""


class ContentBlocks:
    """Blocks in order; only the last one may be open. `signature`: of thinking blocks. `make_call_id`: returns an id
    for a call that has none."""

    def __init__(self, signature: str, make_call_id: Callable[[], str]) -> None:
        self.blocks: list[ContentBlock] = []
        self._signature = signature
        self._make_call_id = make_call_id
        self._is_open = False
        self._input = ""
        """Text of the input of the last call."""

    @property
    def has_calls(self) -> bool:
        return any(isinstance(block, ToolUseBlock) for block in self.blocks)

    def push(self, parts: Iterable[AnswerPart]) -> Iterator[AnyMessageEvent]:
        """Yield the events for further parts of the answer."""
        for part in parts:
            match part:
                case Content(text):
                    yield from self.open_text()
                    block = self.blocks[-1]
                    assert isinstance(block, TextBlock)
                    block.text += text
                    yield self._delta(TextDelta(text=text))
                case Reasoning(text):
                    if not (self._is_open and isinstance(self.blocks[-1], ThinkingBlock)):
                        yield from self._open(ThinkingBlock(thinking="", signature=""))
                    block = self.blocks[-1]
                    assert isinstance(block, ThinkingBlock)
                    block.thinking += text
                    yield self._delta(ThinkingDelta(thinking=text))
                case CallBegin(_, name, call_id):
                    yield from self._open(ToolUseBlock(id=call_id or self._make_call_id(), name=name, input={}))
                    self._input = ""
                case CallArguments(_, text):
                    self._input += text
                    yield self._delta(InputJsonDelta(partial_json=text))

    def open_text(self) -> Iterator[AnyMessageEvent]:
        """Yield the events that open a text block, unless one is open."""
        if not (self._is_open and isinstance(self.blocks[-1], TextBlock)):
            yield from self._open(TextBlock(text=""))

    def close(self) -> Iterator[AnyMessageEvent]:
        """Yield the events that close the last block, if it is open."""
        if not self._is_open:
            return
        self._is_open = False
        block = self.blocks[-1]
        if isinstance(block, ThinkingBlock):
            block.signature = self._signature
            yield self._delta(SignatureDelta(signature=self._signature))
        elif isinstance(block, ToolUseBlock):
            block.input = _to_object(self._input)
        yield ContentBlockStop(index=len(self.blocks) - 1)

    def _open(self, block: ContentBlock) -> Iterator[AnyMessageEvent]:
        yield from self.close()
        self._is_open = True
        self.blocks.append(msgspec.structs.replace(block))  # the event keeps the empty one
        yield ContentBlockStart(index=len(self.blocks) - 1, content_block=block)

    def _delta(self, delta: Any) -> ContentBlockDelta:
        return ContentBlockDelta(index=len(self.blocks) - 1, delta=delta)


def _to_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {BROKEN_INPUT: text}
