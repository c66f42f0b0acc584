"""The body of /v1/responses, and the table of the fields that it takes without an effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from eagleray.messages.sampling import MAX_LOGIT_BIASES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from eagleray.server.field_fates import (
    ACCEPTED,
    COMMON,
    MEDIA,
    SEVERAL_ANSWERS,
    STRUCTURED_OUTPUTS,
    Fate,
    Feature,
    refused,
)
from eagleray.server.fields import ShortText, Timeout
from eagleray.server.openai.responses_api.input_items import InputItems

OUTPUT_LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Annotated[
        str | None, Meta(description="Given to the chat template, whose variable `enable_thinking` it sets too.")
    ] = None
    summary: Annotated[str | None, Meta(description="No effect: reasoning is a part of the text.")] = None
    generate_summary: Annotated[str | None, Meta(description="Older name of `summary`.")] = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    verbosity: Annotated[str | None, Meta(description="No effect.")] = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Answer in a conversation."""

    input: Annotated[str | InputItems, Meta(description="A text of the user, or the items of a conversation.")]
    model: Annotated[str | None, Meta(description="A name of /v1/models; may be left out.")] = None
    instructions: Annotated[str | None, Meta(description="System message, before `input`.")] = None
    max_output_tokens: Annotated[
        Annotated[int, Meta(extra_json_schema={"minimum": 1})] | None,
        Meta(description="Default: as many as the model's length allows."),
    ] = None
    stream: bool | None = None
    temperature: Annotated[float | None, Meta(description="0 is greedy.")] = None
    top_p: float | None = None
    top_k: Annotated[int | None, Meta(description="0 or -1: all tokens.")] = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[
        dict[int, float] | None,
        Meta(description="By token id.", extra_json_schema={"maxProperties": MAX_LOGIT_BIASES}),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        Meta(description="Texts at which the answer ends.", extra_json_schema={"maxItems": MAX_STOP_STRINGS}),
    ] = None
    stop_token_ids: Annotated[list[int] | None, Meta(extra_json_schema={"maxItems": MAX_STOP_TOKEN_IDS})] = None
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
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        Meta(description="Given to the chat template. Only with `tool_choice` none: tool calls are not supported."),
    ] = None
    tool_choice: Annotated[Any, Meta(description="none, or auto without `tools`.")] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="No effect.")] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Returned with the answer.")] = None
    user: Annotated[str | None, Meta(description="Returned with the answer.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="More variables for the chat template.")
    ] = None
    priority: Annotated[
        int | None, Meta(description="Lower runs first. Only where the server schedules by priority.")
    ] = None
    cache_salt: Annotated[
        str | None, Meta(description="Cached prompt beginnings are shared only between requests of the same salt.")
    ] = None
    timeout: Timeout | None = None
    request_id: Annotated[
        ShortText | None, Meta(description="Names the request. Default: the header X-Request-Id.")
    ] = None
    session_id: Annotated[ShortText | None, Meta(description="Names a session. Default: the header X-Session-ID.")] = (
        None
    )

    @property
    def has_logprobs(self) -> bool:
        return OUTPUT_LOGPROBS in (self.include or ())


KEPT_ANSWERS = Feature("answers that are kept", "send the whole conversation as `input`")
BACKGROUND = Feature("answers in the background", "leave it out; `stream` shows the answer while it is made")
PROMPT_TEMPLATES = Feature("templates of prompts that are kept", "write the prompt into `instructions` and `input`")
RAW_MESSAGES = Feature("the messages of the prompt in the answer", "leave it out")


def _renamed(name: str) -> Feature:
    return Feature("a field of this name here", f"call it `{name}`")


RESPONSES_FATES: Mapping[str, Fate] = {
    **COMMON,
    "previous_response_id": refused(KEPT_ANSWERS),
    "conversation": refused(KEPT_ANSWERS),
    "background": refused(BACKGROUND, False),
    "prompt": refused(PROMPT_TEMPLATES),
    "text.format": refused(STRUCTURED_OUTPUTS, {"type": "text"}),
    "n": refused(SEVERAL_ANSWERS, 1),
    "messages": refused(_renamed("input"), []),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), refused(_renamed("max_output_tokens"))),
    "enable_response_messages": refused(RAW_MESSAGES, False),
    "previous_input_messages": refused(KEPT_ANSWERS, []),
    "media_io_kwargs": refused(MEDIA, {}),
    # there are no tool calls to limit, and no obfuscation to switch off
    **dict.fromkeys(("max_tool_calls", "stream_options", "prompt_cache_options"), ACCEPTED),
}
"""Table of /v1/responses."""
