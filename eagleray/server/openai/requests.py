"""The bodies of /v1/completions and of the routes of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from eagleray.server.chat_messages import (
    Conversations,
    Messages,
    ReasoningEffort,
    TemplateVariables,
    ToolChoiceField,
    Tools,
)
from eagleray.server.fields import (
    CacheSalt,
    KeptSide,
    ModelName,
    Priority,
    PromptField,
    RequestId,
    SessionId,
    StreamOptions,
    Timeout,
    TruncationLimit,
)
from eagleray.server.routed_experts import RoutedExpertsFormat
from eagleray.server.structured_outputs import ConstraintFields


class OpenAIRequest(ConstraintFields, kw_only=True):
    """The fields that both bodies have."""

    model: ModelName = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority = None
    cache_salt: CacheSalt = None
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
    request_id: RequestId = None
    session_id: SessionId = None
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


class ChatFields(OpenAIRequest, kw_only=True):
    """The fields of requests to answer in conversations."""

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
    chat_template_kwargs: TemplateVariables = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Default false: chat templates write the special tokens themselves.")
    ] = None
    chat_template: Annotated[
        str | None,
        Meta(description="Jinja template in place of the model's. Only with the option `trust_request_chat_template`."),
    ] = None
    documents: Annotated[list[dict[str, Any]] | None, Meta(description="Given to the chat template.")] = None
    reasoning_effort: ReasoningEffort = None
    tools: Tools = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Default true: an answer may call several tools.")] = (
        None
    )
    include_reasoning: Annotated[
        bool | None, Meta(description="Default true: show the reasoning, if the server divides it from the answer.")
    ] = None


class ChatRequest(ChatFields, kw_only=True, forbid_unknown_fields=True):
    """Answer in a conversation."""

    messages: Messages


class ChatBatchRequest(ChatFields, kw_only=True, forbid_unknown_fields=True):
    """Answer in each of several conversations."""

    messages: Conversations
