"""The answers of /generate."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from eagleray.client.outputs import CompletionDelta, CompletionOutput, WeightVersionSpan
from eagleray.messages.outputs import FinishReason
from eagleray.server.sglang.logprobs import TokenEntry


class SGLangFinishReason(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, Meta(description="stop, length or abort.")]
    matched: Annotated[
        int | str | UnsetType | None, Meta(description="Token or text that ended a completion of type stop.")
    ] = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class MetaInfo(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: SGLangFinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Annotated[int, Meta(description="Tokens of the prompt that the prefix cache had.")]
    weight_version: Annotated[str, Meta(description="Version of the weights that made the last token.")]
    weight_versions: Annotated[
        list[WeightVersionSpan] | UnsetType, Meta(description="Versions of the weights by tokens, at the end.")
    ] = UNSET
    e2e_latency: Annotated[float | UnsetType, Meta(description="Seconds, at the end.")] = UNSET
    input_token_logprobs: list[TokenEntry] | UnsetType = UNSET
    input_top_logprobs: list[list[TokenEntry] | None] | UnsetType = UNSET
    output_token_logprobs: Annotated[
        list[TokenEntry] | UnsetType, Meta(description="Log-probability, token id and text or null of each token.")
    ] = UNSET
    output_top_logprobs: list[list[TokenEntry] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[TokenEntry] | None] | UnsetType = UNSET
    routed_experts: Annotated[
        str | UnsetType, Meta(description="int32 of [num_tokens - 1 - start, num_layers, top_k], in base64.")
    ] = UNSET
    routed_experts_start_len: int | UnsetType = UNSET


class SGLangCompletion(msgspec.Struct, kw_only=True):
    """A completion; a request of several, or with `n`, is answered by a list of them."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: Annotated[int | UnsetType, Meta(description="Number of the completion, in events of several.")] = UNSET


def finish_reason(part: CompletionOutput | CompletionDelta, num_tokens: int) -> SGLangFinishReason:
    """Return the reason for which a completion of `num_tokens` tokens ended, of which `part` is the last part."""
    match part.finish_reason:
        case FinishReason.STOP:
            matched = part.stop_reason
            if matched is None and part.token_ids:
                matched = part.token_ids[-1]  # an end-of-sequence token
            return SGLangFinishReason(type="stop", matched=matched)
        case FinishReason.LENGTH:
            return SGLangFinishReason(type="length", length=num_tokens)
        case _:
            return SGLangFinishReason(type="abort", message="The request was aborted.")
