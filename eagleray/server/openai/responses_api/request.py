"""The bodies of /v1/responses and /v1/responses/input_tokens, and the tables of the fields without an effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import MAX_STOP_STRINGS
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.server.chat_messages import ReasoningEffort, TemplateVariables, ToolChoiceField, Tools
from eagleray.server.field_fates import (
    ACCEPTED,
    COMMON,
    JOINED_REASONING,
    MEDIA,
    SEVERAL_ANSWERS,
    Fate,
    Feature,
    refused,
    unconstrained,
)
from eagleray.server.fields import (
    CacheSalt,
    LogitBias,
    ModelName,
    Priority,
    RequestId,
    SessionId,
    StopTokenIds,
    Temperature,
    Timeout,
    TopK,
)
from eagleray.server.openai.responses_api.input_items import InputItems

OUTPUT_LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: ReasoningEffort = None
    summary: Annotated[str | None, Meta(description="No effect: reasoning is shown as it is.")] = None
    generate_summary: Annotated[str | None, Meta(description="Older name of `summary`.")] = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Form of the text of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Meta(description="With the type json_schema.")] = msgspec.field(
        default=None, name="schema"
    )
    description: str | None = None
    strict: Annotated[bool | None, Meta(description="No effect: every answer follows its schema.")] = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Annotated[str | None, Meta(description="No effect.")] = None


class ResponsesInput(msgspec.Struct, kw_only=True):
    """The fields that determine the prompt, and some that clients send beside them."""

    input: Annotated[str | InputItems, Meta(description="A text of the user, or the items of a conversation.")]
    model: ModelName = None
    instructions: Annotated[str | None, Meta(description="System message, before `input`.")] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Given to the chat template.")] = None
    tool_choice: Annotated[Any, Meta(description="No effect on the prompt.")] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Default true: an answer may call several tools.")] = (
        None
    )
    chat_template_kwargs: TemplateVariables = None


class InputTokensRequest(ResponsesInput, kw_only=True, forbid_unknown_fields=True):
    """Count the tokens of a prompt."""


class ResponsesRequest(ResponsesInput, kw_only=True, forbid_unknown_fields=True):
    """Answer in a conversation."""

    max_output_tokens: Annotated[
        Annotated[int, Meta(extra_json_schema={"minimum": 1})] | None,
        Meta(description="Default: as many as the model's length allows."),
    ] = None
    stream: bool | None = None
    temperature: Temperature = None
    top_p: float | None = None
    top_k: TopK = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = None
    stop: Annotated[
        str | list[str] | None,
        Meta(description="Texts at which the answer ends.", extra_json_schema={"maxItems": MAX_STOP_STRINGS}),
    ] = None
    stop_token_ids: StopTokenIds = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include: Annotated[
        list[str] | None,
        Meta(description=f"`{OUTPUT_LOGPROBS}` asks for log-probabilities; other values have no effect."),
    ] = None
    top_logprobs: Annotated[
        int | None, Meta(description="Number of likeliest tokens to report with each log-probability.")
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Meta(description="auto: keep the last tokens of a prompt that is too long for the model's length."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None, Meta(description="Constraint of the text, with the names of vLLM.")
    ] = None
    thinking_token_budget: Annotated[
        int | None, Meta(description="Tokens after which the model's thinking is ended; -1: no limit.")
    ] = None
    include_reasoning: Annotated[
        bool | None, Meta(description="Default true: show the reasoning, if the server divides it from the answer.")
    ] = None
    tools: Tools = None
    tool_choice: ToolChoiceField = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Returned with the answer.")] = None
    user: Annotated[str | None, Meta(description="Returned with the answer.")] = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout: Timeout | None = None
    request_id: RequestId = None
    session_id: SessionId = None

    @property
    def has_logprobs(self) -> bool:
        return OUTPUT_LOGPROBS in (self.include or ())


def to_constraint(form: TextFormat | None) -> StructuredOutputsParams | None:
    """Return the constraint that `text.format` asks for. Raises `InvalidRequest` without a schema."""
    match form:
        case None | TextFormat(type="text"):
            return None
        case TextFormat(type="json_object"):
            return StructuredOutputsParams(json_object=True)
    if form.schema_ is None:
        raise InvalidRequest(
            '`text.format` of type json_schema needs a `schema`: {"type": "json_schema", "name": …, "schema": …}',
            param="text.format.schema",
        )
    return StructuredOutputsParams(json=form.schema_)


KEPT_ANSWERS = Feature("answers that are kept", "send the whole conversation as `input`")
BACKGROUND = Feature("answers in the background", "leave it out; `stream` shows the answer while it is made")
PROMPT_TEMPLATES = Feature("templates of prompts that are kept", "write the prompt into `instructions` and `input`")
RAW_MESSAGES = Feature("the messages of the prompt in the answer", "leave it out")


def _renamed(name: str) -> Feature:
    return Feature("a field of this name here", f"call it `{name}`")


_INPUT_FATES: Mapping[str, Fate] = {
    "previous_response_id": refused(KEPT_ANSWERS),
    "conversation": refused(KEPT_ANSWERS),
}

INPUT_TOKENS_FATES: Mapping[str, Fate] = {
    **_INPUT_FATES,
    "truncation": ACCEPTED,  # all tokens are counted
}
"""Table of /v1/responses/input_tokens."""

RESPONSES_FATES: Mapping[str, Fate] = {
    **COMMON,
    "separate_reasoning": refused(JOINED_REASONING, True),
    **_INPUT_FATES,
    **{
        name: fate
        for name, fate in unconstrained("use `text.format` or `structured_outputs`").items()
        if name != "structured_outputs"
    },
    "response_format": refused(_renamed("text.format"), {"type": "text"}),
    "background": refused(BACKGROUND, False),
    "prompt": refused(PROMPT_TEMPLATES),
    "n": refused(SEVERAL_ANSWERS, 1),
    "messages": refused(_renamed("input"), []),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), refused(_renamed("max_output_tokens"))),
    "enable_response_messages": refused(RAW_MESSAGES, False),
    "previous_input_messages": refused(KEPT_ANSWERS, []),
    "media_io_kwargs": refused(MEDIA, {}),
    # there are no calls of the server's own tools to limit, and no obfuscation to switch off
    **dict.fromkeys(("max_tool_calls", "stream_options", "prompt_cache_options"), ACCEPTED),
}
"""Table of /v1/responses."""
