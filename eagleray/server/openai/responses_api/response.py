"""The answer of /v1/responses, whole and as the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET

from eagleray.server.generation import WeightVersionsField
from eagleray.server.logprobs import ChatTokenLogprob

ResponseState = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
"""Values of `status`. `cancelled`: the server's control calls ended the answer."""


ItemState = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """Text of an answer."""

    id: str
    status: ItemState
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]
    """One part; none before the event that adds it."""
    weight_versions: WeightVersionsField = UNSET
    """Only in the last item of an answer, as in the items of other types."""


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning before a text or a call."""

    id: str
    status: ItemState
    summary: list[Any] = []
    """Always empty."""
    content: list[ReasoningText]
    """One part; none before the event that adds it."""
    weight_versions: WeightVersionsField = UNSET


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """Call of a tool."""

    id: str
    status: ItemState
    call_id: str
    name: str
    arguments: str = ""
    """A JSON object, unless the model broke it or was cut off."""
    weight_versions: WeightVersionsField = UNSET


AnyOutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int
    """Tokens that the text of the reasoning has; 0 if it is a part of the answer's text."""


class InputOutputUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class InputTokenCount(msgspec.Struct, kw_only=True):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class IncompleteReason(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseFailure(msgspec.Struct, kw_only=True):
    code: Literal["server_error"] = "server_error"
    """The only one of OpenAI's codes for what may happen here."""
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """The answer. Besides the output it has the parameters of the request, with their defaults."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseState
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteReason | None = None
    instructions: str | None
    max_output_tokens: int
    max_tool_calls: None = None
    model: str
    output: list[AnyOutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    usage: InputOutputUsage | None = None
    user: str | None
    metadata: dict[str, str]


class ResponseEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event of a stream. Its number counts from 0."""

    sequence_number: int


class ResponseCreated(ResponseEvent, kw_only=True, tag="response.created"):
    response: ResponseObject


class ResponseInProgress(ResponseEvent, kw_only=True, tag="response.in_progress"):
    response: ResponseObject


class ResponseCompleted(ResponseEvent, kw_only=True, tag="response.completed"):
    response: ResponseObject


class ResponseIncomplete(ResponseEvent, kw_only=True, tag="response.incomplete"):
    response: ResponseObject


class ResponseFailed(ResponseEvent, kw_only=True, tag="response.failed"):
    response: ResponseObject


class OutputItemAdded(ResponseEvent, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: AnyOutputItem


class OutputItemDone(ResponseEvent, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: AnyOutputItem


class ItemEvent(ResponseEvent, kw_only=True):
    """An event about the item of this id."""

    item_id: str
    output_index: int


class TextEvent(ItemEvent, kw_only=True):
    """An event about the text of a message or of reasoning."""

    content_index: int = 0


class ContentPartAdded(TextEvent, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(TextEvent, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(TextEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(TextEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextDelta(TextEvent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(TextEvent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class FunctionArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class FunctionArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


AnyResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionArgumentsDelta
    | FunctionArgumentsDone
    | ContentPartDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
