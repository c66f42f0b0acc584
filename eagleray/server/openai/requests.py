"""The bodies of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from eagleray.server.chat_messages import Messages
from eagleray.server.fields import SamplingFields, ShortText, StreamOptions, Timeout
from eagleray.server.prompt_fields import KeptSide, PromptField, TruncationLimit
from eagleray.server.routed_experts import RoutedExpertsFormat


class OpenAIRequest(SamplingFields, kw_only=True):
    """The fields that both bodies have."""

    model: Annotated[str | None, Meta(description="A name of /v1/models; may be left out.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[
        int | None, Meta(description="Lower runs first. Only where the server schedules by priority.")
    ] = None
    cache_salt: Annotated[
        str | None, Meta(description="Cached prompt beginnings are shared only between requests of the same salt.")
    ] = None
    timeout: Timeout | None = None
    return_token_ids: Annotated[bool | None, Meta(description="Also give the token ids of prompt and completions.")] = (
        None
    )
    truncate_prompt_tokens: TruncationLimit = None
    truncation_side: KeptSide = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Meta(description="Name the tokens of log-probabilities `token_id:<id>`. Default: as set up.")
    ] = None
    return_token_offsets: Annotated[bool | None, Meta(description="Has an effect on the routes that render alone.")] = (
        None
    )
    routed_experts_format: RoutedExpertsFormat | None = None
    request_id: Annotated[
        ShortText | None, Meta(description="Names the request. Default: the header X-Request-Id.")
    ] = None
    session_id: Annotated[ShortText | None, Meta(description="Names a session. Default: the header X-Session-ID.")] = (
        None
    )
    user: Annotated[str | None, Meta(description="OpenAI's label of the end user; no effect on the answer.")] = None
    metadata: Annotated[Any, Meta(description="No effect on the answer.")] = None


class CompletionRequest(OpenAIRequest, kw_only=True, forbid_unknown_fields=True):
    """Continue a text."""

    prompt: PromptField
    logprobs: Annotated[
        int | None, Meta(description="Report each token's log-probability and those of this many likeliest.")
    ] = None
    echo: Annotated[bool | None, Meta(description="Begin the answer with the prompt.")] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Default true: a text begins as the model expects it. Token ids are taken as they are."),
    ] = None


class ChatRequest(OpenAIRequest, kw_only=True, forbid_unknown_fields=True):
    """Answer in a conversation."""

    messages: Messages
    logprobs: Annotated[bool | None, Meta(description="Report the tokens' log-probabilities.")] = None
    top_logprobs: Annotated[
        int | None, Meta(description="Also of this many likeliest tokens; -1: of the whole vocabulary.")
    ] = None
    echo: Annotated[
        bool | None,
        Meta(description="Begin the answer with the last message, if it is of the same role, and report its tokens."),
    ] = None
    return_prompt_text: Annotated[bool | None, Meta(description="Also give the prompt as the template wrote it.")] = (
        None
    )
    max_completion_tokens: Annotated[int | None, Meta(description="OpenAI's newer name of `max_tokens`.")] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="End with the beginning of an answer. Default: unless continue_final_message.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Leave the last message open, for the model to go on with.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="More variables for the chat template.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Default false: chat templates write the special tokens themselves.")
    ] = None
    chat_template: Annotated[
        str | None,
        Meta(description="Jinja template in place of the model's. Only with the option `trust_request_chat_template`."),
    ] = None
    documents: Annotated[list[dict[str, Any]] | None, Meta(description="Given to the chat template.")] = None
    reasoning_effort: Annotated[
        str | None, Meta(description="Given to the chat template, whose variable `enable_thinking` it sets too.")
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        Meta(description="Given to the chat template. Only with `tool_choice` none: tool calls are not supported."),
    ] = None
    tool_choice: Annotated[Any, Meta(description="none, or auto without `tools`.")] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="No effect.")] = None
