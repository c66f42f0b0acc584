"""What users of the client get: results of whole requests, and what is new since they last looked.

Shaped as users of vLLM know them. Plain data; made by `ClientRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eagleray.messages.arrays import Array
from eagleray.messages.outputs import FinishReason


@dataclass(slots=True)
class Logprob:
    """One token at one position."""

    logprob: float
    """Natural logarithm of the model's own probability, before any sampling parameter."""
    rank: int | None = None
    """1 is the likeliest. None for a token that was only reported because its id was asked for."""
    decoded_token: str | None = None
    """None without a tokenizer, or with `detokenize` off."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` completions of a prompt."""

    index: int
    text: str
    """Empty with `detokenize` off."""
    token_ids: list[int]
    """With the token that ended it, if one did."""
    cumulative_logprob: float | None = None
    """Sum over `token_ids`; None if no logprobs were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`, by token id: the chosen token, the likeliest ones, then those asked for by id."""
    finish_reason: FinishReason | None = None
    """A string: `stop`, `length` or `abort`."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for anything else, the end-of-sequence token included."""
    routed_experts: Array | None = field(default=None, compare=False)
    """Which experts computed the tokens of prompt and completion from position `routed_experts_start` on, by the
    model's own numbers, from the likeliest to the least likely: uint8, or uint16 for more than 256 experts,
    [num_tokens - 1 - start, num_moe_layers, top_k]. The last token has none, for it was not computed; a completion that
    was aborted has what there was. None if not asked for."""
    routed_experts_start: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request with all its completions."""

    request_id: str
    prompt: str | None
    """None if it was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, as in `CompletionOutput.logprobs`; None for the first, which nothing precedes."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens that did not have to be computed: the prefix cache had them."""


@dataclass(slots=True, kw_only=True)
class CompletionDelta:
    """What is new of one completion."""

    index: int
    text: str
    """May be empty although there are tokens: a character is incomplete, or it may become a stop string."""
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`; None if not asked for."""
    finish_reason: FinishReason | None = None
    """Not None exactly once, in the completion's last delta."""
    stop_reason: int | str | None = None
    routed_experts: Array | None = field(default=None, compare=False)
    """As in `CompletionOutput`, what is new of them: those of the prompt come before there are tokens. None if there
    are no new ones."""
    routed_experts_start: int = 0
    """Position in the sequence of the first of them: those of all deltas follow each other."""


@dataclass(slots=True, kw_only=True)
class RequestDelta:
    """Output that is new since the last delta, or a part of it. A slow reader gets several steps in one."""

    request_id: str
    outputs: list[CompletionDelta]
    """Only the completions with something new, by index."""
    finished: bool
    """This is the last delta."""
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """In one delta, the one in which they are complete, if they were asked for."""
    num_cached_tokens: int = 0
    """Of the prompt, as in `RequestOutput`; the same number in every delta."""
