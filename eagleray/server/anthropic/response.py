"""The answers of /v1/messages, whole and as the events of a stream, and of /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from eagleray.server.anthropic.errors import AnthropicErrorEvent
from eagleray.server.generation import Usage, WeightVersionsField

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str
    """Id of the message. It is not looked at in a later request."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Tokens of the prompt, without those of the next two fields if the server shows them."""
    cache_creation_input_tokens: int | UnsetType = UNSET
    cache_read_input_tokens: int | UnsetType = UNSET
    """Tokens that the prefix cache had."""
    output_tokens: int


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    """None before the end, and for an answer that the server's control calls ended."""
    stop_sequence: str | None = None
    usage: AnthropicUsage
    weight_versions: WeightVersionsField = UNSET


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class ContentBlockStart(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """An event without content."""


class TextDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="signature_delta"):
    """The end of a thinking block."""

    signature: str


class InputJsonDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of the text of a tool's input."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, kw_only=True, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, kw_only=True):
    stop_reason: StopReason | None
    stop_sequence: str | None
    weight_versions: WeightVersionsField = UNSET


class MessageDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: AnthropicUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


AnyMessageEvent = (
    MessageStart
    | ContentBlockStart
    | Ping
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | AnthropicErrorEvent
)


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int


def anthropic_usage(usage: Usage) -> AnthropicUsage:
    """Return the usage so far. The parts of Anthropic's prompts do not overlap."""
    details = usage.prompt_tokens_details
    if details is None:
        return AnthropicUsage(input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens)
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - details.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=details.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
