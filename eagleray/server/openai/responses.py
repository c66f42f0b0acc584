"""The answers of OpenAI's API, whole and as the events of a stream. Fields that are UNSET are left out.

As in vLLM, a whole answer has all its keys, with null for what was not asked for; an event has few.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from eagleray.server.generation import Usage, WeightVersionsField
from eagleray.server.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobList
from eagleray.server.routed_experts import RoutedExpertsField


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the completion."""
    prompt_logprobs: PromptLogprobList | UnsetType | None = UNSET
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    routed_experts: RoutedExpertsField = UNSET
    weight_versions: WeightVersionsField = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole answer, or with `stream` one event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    """In a stream, only the last event of a choice and the one that shows the usage have it."""
    usage: Usage | UnsetType | None = UNSET
    # Fields of vLLM's whole answers, for features that do not exist here.
    kv_transfer_params: UnsetType | None = UNSET
    ec_transfer_params: UnsetType | None = UNSET
    metrics: UnsetType | None = UNSET


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str
    """A JSON object, unless the model broke it or was cut off."""


class ChatToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None
    """None beside tool calls or reasoning if there is no text."""
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET
    """The same as `reasoning`, by its older name."""


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: RoutedExpertsField = None
    weight_versions: WeightVersionsField = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    # Fields of vLLM's answers, for features that do not exist here.
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """More of a tool call. Only the first one of a call has its id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same as `reasoning`, by its older name."""
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: RoutedExpertsField = UNSET
    weight_versions: WeightVersionsField = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | UnsetType = UNSET
    """Only in the last event of a choice and in the one that shows the usage."""
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    """Only in the first event; null if they were not asked for."""
    prompt_text: str | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "eagleray"
    root: str
    """The model that was asked for, by its id or directory, or the adapter's directory."""
    parent: str | None = None
    """Name of the model that an adapter belongs to."""
    max_model_len: int | None
    """None before the first engine has joined."""


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
