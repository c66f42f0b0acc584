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
        """Blocks that were opened; each is complete when it is closed."""
        self._signature = signature
        self._make_call_id = make_call_id
        self._opened: type[ContentBlock] | None = None
        """Type of the open block."""
        self._texts: list[str] = []
        """Text of the open block, in pieces."""

    @property
    def has_calls(self) -> bool:
        return any(isinstance(block, ToolUseBlock) for block in self.blocks)

    def push(self, parts: Iterable[AnswerPart]) -> Iterator[AnyMessageEvent]:
        """Yield the events for further parts of the answer."""
        for part in parts:
            match part:
                case Content(text):
                    yield from self.open_text()
                    yield self._add(text, TextDelta(text=text))
                case Reasoning(text):
                    if self._opened is not ThinkingBlock:
                        yield from self._open(ThinkingBlock(thinking="", signature=""))
                    yield self._add(text, ThinkingDelta(thinking=text))
                case CallBegin(_, name, call_id):
                    yield from self._open(ToolUseBlock(id=call_id or self._make_call_id(), name=name, input={}))
                case CallArguments(_, text):
                    yield self._add(text, InputJsonDelta(partial_json=text))

    def open_text(self) -> Iterator[AnyMessageEvent]:
        """Yield the event that opens a text block, unless one is open."""
        if self._opened is not TextBlock:
            yield from self._open(TextBlock(text=""))

    def close(self) -> Iterator[AnyMessageEvent]:
        """Yield the events that close the open block, which is replaced by the complete one."""
        if self._opened is None:
            return
        self._opened = None
        index, text = len(self.blocks) - 1, "".join(self._texts)
        match self.blocks[index]:
            case TextBlock():
                self.blocks[index] = TextBlock(text=text)
            case ThinkingBlock():
                self.blocks[index] = ThinkingBlock(thinking=text, signature=self._signature)
                yield ContentBlockDelta(index=index, delta=SignatureDelta(signature=self._signature))
            case ToolUseBlock(id=call_id, name=name):
                self.blocks[index] = ToolUseBlock(id=call_id, name=name, input=_to_object(text))
        yield ContentBlockStop(index=index)

    def _open(self, block: ContentBlock) -> Iterator[AnyMessageEvent]:
        yield from self.close()
        self.blocks.append(block)
        self._opened, self._texts = type(block), []
        yield ContentBlockStart(index=len(self.blocks) - 1, content_block=block)

    def _add(self, text: str, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> ContentBlockDelta:
        self._texts.append(text)
        return ContentBlockDelta(index=len(self.blocks) - 1, delta=delta)


def _to_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {BROKEN_INPUT: text}
