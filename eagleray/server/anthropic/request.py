"""The bodies of /v1/messages and /v1/messages/count_tokens, and the table of the fields without an effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from eagleray.messages.sampling import MAX_STOP_STRINGS
from eagleray.server.anthropic.history import AnthropicMessages, SystemText
from eagleray.server.chat_messages import TemplateVariables, Tools
from eagleray.server.field_fates import (
    ACCEPTED,
    COMMON,
    NO_REASONING,
    SEVERAL_ANSWERS,
    Fate,
    Feature,
    ignored,
    refused,
    unconstrained,
)
from eagleray.server.fields import CacheSalt, ModelName, Priority, RequestId, SessionId, Temperature, Timeout, TopK


class ThinkingOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="disabled, or else a separation of the thinking.")]
    budget_tokens: Annotated[int | None, Meta(description="Tokens after which the thinking is ended.")] = None
    display: Annotated[str | None, Meta(description="No effect.")] = None


class ToolChoiceOptions(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: Annotated[str | None, Meta(description="With the type tool.")] = None
    disable_parallel_tool_use: Annotated[bool | None, Meta(description="An answer has at most one call.")] = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = msgspec.field(name="schema")


class OutputOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: Annotated[OutputFormat | None, Meta(description="Form of the text of the answer.")] = None
    effort: Annotated[str | None, Meta(description="Given to the chat template as `reasoning_effort`.")] = None


class AnthropicRequest(msgspec.Struct, kw_only=True):
    """The fields that determine the prompt."""

    model: ModelName = None
    messages: AnthropicMessages
    system: SystemText = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    tools: Tools = None
    tool_choice: ToolChoiceOptions | None = None
    chat_template_kwargs: TemplateVariables = None


class MessagesRequest(AnthropicRequest, kw_only=True, forbid_unknown_fields=True):
    """Answer in a conversation."""

    max_tokens: Annotated[int, Meta(extra_json_schema={"minimum": 1})]
    stream: bool | None = None
    stop_sequences: Annotated[
        list[str] | None,
        Meta(description="Texts at which the answer ends.", extra_json_schema={"maxItems": MAX_STOP_STRINGS}),
    ] = None
    temperature: Temperature = None
    top_p: float | None = None
    top_k: TopK = None
    metadata: Annotated[Any, Meta(description="No effect on the answer.")] = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout: Timeout | None = None
    request_id: RequestId = None
    session_id: SessionId = None


class CountTokensRequest(AnthropicRequest, kw_only=True, forbid_unknown_fields=True):
    """Count the tokens of a prompt."""


SERVER_TOOLS = Feature("tools that the server runs", "leave it out")
OPENAI_STOP = Feature("a field of this name here", "call it `stop_sequences`")
OTHER_FORMAT = Feature("a field of this name here", "call it `output_config.format`")
OTHER_BUDGET = Feature("a field of this name here", "call it `thinking.budget_tokens`")
CONTAINERS = Feature("containers for code", "leave it out")

COUNT_FATES: Mapping[str, Fate] = {
    "output_format": refused(OTHER_FORMAT),
    "mcp_servers": refused(SERVER_TOOLS, []),
    "container": refused(CONTAINERS),
    **dict.fromkeys(("cache_control", "betas", "diagnostics", "user_profile_id"), ACCEPTED),
    "speed": ignored("standard"),
    "inference_geo": ignored(),
}
"""Table of /v1/messages/count_tokens."""

MESSAGES_FATES: Mapping[str, Fate] = {
    **COMMON,
    **NO_REASONING,
    **unconstrained("use `output_config.format`"),
    **COUNT_FATES,
    "service_tier": ignored("auto", "standard_only"),
    "stop": refused(OPENAI_STOP, []),
    "response_format": refused(OTHER_FORMAT, {"type": "text"}),
    "thinking_token_budget": refused(OTHER_BUDGET, -1),
    "n": refused(SEVERAL_ANSWERS, 1),
}
"""Table of /v1/messages."""
