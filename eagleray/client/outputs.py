"""Outputs of requests: whole, and as deltas since the reader's last look.

Shaped as users of vLLM know them. Plain data; made by `ClientRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagleray.client.answers.parts import ToolCall
from eagleray.messages.arrays import Array
from eagleray.messages.outputs import FinishReason


@dataclass(slots=True)
class Logprob:
    """The log-probability of a token at one position."""

    logprob: float
    """Natural logarithm of the model's own probability, before any sampling parameter. With the option `logprobs_mode`
    it may be a logit instead, or be processed by the sampling parameters: minus infinity for a token that they drop."""
    rank: int | None = None
    """1 is the likeliest; None for a token that was reported only because its id was requested."""
    decoded_token: str | None = None
    """None without a tokenizer, or with `detokenize` off."""


@dataclass(slots=True, frozen=True, kw_only=True)
class WeightVersionSpan:
    """Consecutive tokens of a completion that were computed with one version of the weights."""

    version: str
    """The trainer's name for the weights; "default" for those of the checkpoint."""
    start: int
    """Index of the first token, in the tokens of the completion."""
    end: int
    """Index after the last token."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """The output of one of the `n` completions of a prompt."""

    index: int
    text: str
    """Empty with `detokenize` off."""
    token_ids: list[int]
    """The tokens, with the one that ended the completion, if one did."""
    cumulative_logprob: float | None = None
    """Sum over `token_ids`; None if no log-probabilities were requested."""
    logprobs: Sequence[dict[int, Logprob]] | None = None
    """A mapping by token id for each of `token_ids`: the chosen token, the likeliest, then those requested by id. A
    list, or a `FlatLogprobs` if `flat_logprobs` asks for it."""
    finish_reason: FinishReason | None = None
    """`stop`, `length` or `abort`; None before the end."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the completion; None at other ends, such as an end-of-sequence token."""
    routed_experts: Array | None = field(default=None, compare=False)
    """Experts that computed the tokens of prompt and completion from position `routed_experts_start` on, by the model's
    own numbers, from the likeliest to the least likely: uint8, or uint16 for more than 256 experts,
    [num_tokens - 1 - start, num_moe_layers, top_k]. The last token has none, because it was not computed; an aborted
    completion has those of the tokens that were computed. None if not requested."""
    routed_experts_start: int = 0
    weight_versions: list[WeightVersionSpan] | None = None
    """The versions of the weights that made `token_ids`, without gaps; None in a part of a stream before the last one.
    The last part has those of the whole completion."""
    reasoning: str | None = None
    """Reasoning in the text, of an answer of `LLM.chat`; None without any, and if the model's format is not known."""
    content: str | None = None
    """Text of an answer of `LLM.chat` without its reasoning and calls; None if nothing else was written."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls in the text, of an answer of `LLM.chat` with `tools`."""
    lora_request: Any = None
    """Always None: outputs do not name their adapter."""
    kv_transfer_params: dict[str, Any] | None = None
    """Always None: caches are not transferred between deployments."""

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestStateStats:
    """Times of a request in its client, with the names of vLLM."""

    num_generation_tokens: int
    """Number of generated tokens of all completions."""
    arrival_time: float
    """Time at which the request was sent, in seconds since the epoch."""
    first_token_ts: float
    """Time at which the first token came, in seconds by `time.perf_counter`; 0 if none came."""
    last_token_ts: float
    """Time at which the request ended, by the same clock."""
    first_token_latency: float
    """Seconds from the arrival to the first token; 0 if none came."""


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request with all its completions."""

    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """An entry for each prompt token, as in `CompletionOutput.logprobs`; None for the first, which nothing precedes."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Number of prompt tokens that the prefix cache had, so they were not computed."""
    prompt_token_id_logprobs: Array | None = field(default=None, compare=False)
    """float32 [num_rows, num_ids], the scores of `SamplingParams.prompt_logprob_token_ids`."""
    metrics: RequestStateStats | None = field(default=None, compare=False)
    """Times of the request; None in an output that was made before the end."""
    lora_request: Any = None
    """Always None: outputs do not name their adapter."""
    encoder_prompt: str | None = None
    """Always None: no supported model has an encoder."""
    encoder_prompt_token_ids: list[int] | None = None
    """Always None, as `encoder_prompt`."""
    kv_transfer_params: dict[str, Any] | None = None
    """Always None: caches are not transferred between deployments."""


@dataclass(slots=True, kw_only=True)
class CompletionDelta:
    """Output of one completion since its last delta."""

    index: int
    text: str
    """Empty although there are tokens if a character is incomplete, or the text may become a stop string."""
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None = None
    """An entry for each of `token_ids`; None if not requested."""
    finish_reason: FinishReason | None = None
    """None in every delta of a completion but its last."""
    stop_reason: int | str | None = None
    routed_experts: Array | None = field(default=None, compare=False)
    """New rows, as in `CompletionOutput`; rows of the prompt come before there are tokens. None without new rows."""
    routed_experts_start: int = 0
    """Position of the first new row; the rows of consecutive deltas are consecutive."""
    weight_versions: list[WeightVersionSpan] | None = None
    """The versions of the weights that made the tokens of the whole completion; None in every delta but the last."""


@dataclass(slots=True, kw_only=True)
class RequestDelta:
    """Output since the last delta, or a part of it. A slow reader gets several steps in one delta."""

    request_id: str
    outputs: list[CompletionDelta]
    """Deltas of the completions with new output, by index."""
    finished: bool
    """Whether this is the last delta."""
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """Set in one delta, as soon as all are known, if they were requested."""
    num_cached_tokens: int = 0
    """Total, as in `RequestOutput`, and not the number since the last delta."""
