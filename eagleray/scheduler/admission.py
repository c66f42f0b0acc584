"""Refusal of requests that can never run. Pure functions.

This project's own clients have checked most of it and given their users more detail. A mistake of a foreign client must
not reach the workers, because it would crash them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import chain

from eagleray.config.pooling_spec import GENERATES_ONLY, POOLS_ONLY, too_long_to_pool
from eagleray.errors import InvalidRequest, PromptTooLong
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling

NUM_TOKEN_IDS = 2**31
"""Number of token ids that fit the 32 bits in which workers keep them."""


def check_admission(
    message: Generate, *, max_model_len: int, vocab_size: int, has_routing: bool = False, pools: bool = False
) -> None:
    """Raise `InvalidRequest` if the request can never run. `has_routing`: the engine can report routed experts;
    `pools`: it has a pooling model."""
    if message.pools != pools:
        raise InvalidRequest(POOLS_ONLY if pools else GENERATES_ONLY, param="model")
    if pools:
        _check_pooled(message, max_model_len)
        _check_ids("the prompt's token ids", message.prompt_token_ids, vocab_size, param="prompt")
        return
    _check_prompt(message, max_model_len)
    _check_output(message, max_model_len)
    _check_routed_experts(message, has_routing)
    _check_sampling(message.sampling, vocab_size)
    _check_ids("the prompt's token ids", message.prompt_token_ids, vocab_size, param="prompt")
    _check_ids("the output's token ids", message.output_token_ids, vocab_size, param="output_token_ids")


def _check_pooled(message: Generate, max_model_len: int) -> None:
    num_tokens = len(message.prompt_token_ids)
    if num_tokens == 0:
        raise InvalidRequest("the prompt is empty, but it needs at least one token", param="prompt")
    if num_tokens > max_model_len:
        raise PromptTooLong(too_long_to_pool(f"it has {num_tokens} tokens", max_model_len), param="prompt")
    if message.stopping.max_tokens != 1 or message.output_token_ids or message.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "a request for a pooling model has `max_tokens` 1, no output tokens and no log-probabilities", param="pools"
        )
    if message.routed_experts_from is not None:
        raise InvalidRequest(
            "a pooling model reports no routed experts: leave out `routed_experts_from`", param="routed_experts_from"
        )


def _check_prompt(message: Generate, max_model_len: int) -> None:
    num_tokens = len(message.prompt_token_ids)
    if num_tokens == 0:
        raise InvalidRequest("the prompt is empty, but it needs at least one token to continue from", param="prompt")
    if num_tokens >= max_model_len:
        raise PromptTooLong.for_model(f"it has {num_tokens} tokens", max_model_len)
    _check_scored(message.sampling, num_tokens - 1)
    if not 1 <= message.prompt_logprobs_from <= num_tokens:
        raise InvalidRequest(
            f"`prompt_logprobs_from` must be between 1 and {num_tokens}, the number of the prompt's tokens, but it is "
            f"{message.prompt_logprobs_from}",
            param="prompt_logprobs_from",
        )


def _check_scored(sampling: Sampling, num_rows: int) -> None:
    """Check the shape of the ids that are scored at positions of the prompt."""
    rows = sampling.prompt_logprob_token_ids
    if rows and (sampling.prompt_logprobs is None or len(rows) != num_rows or len(set(map(len, rows))) != 1):
        raise InvalidRequest(
            f"`prompt_logprob_token_ids` must have {num_rows} rows of one length, and needs `prompt_logprobs`",
            param="prompt_logprob_token_ids",
        )


def _check_output(message: Generate, max_model_len: int) -> None:
    """Check that a request that resumes lacks at least one of its tokens."""
    max_tokens, num_known = message.stopping.max_tokens, len(message.output_token_ids)
    if max_tokens < 1:
        raise InvalidRequest(f"`max_tokens` must be at least 1, but it is {max_tokens}", param="max_tokens")
    room = min(max_tokens, max_model_len - len(message.prompt_token_ids))
    if num_known >= room:
        raise InvalidRequest(
            f"the request has {num_known} output tokens already, but by `max_tokens` and the model's length it may "
            f"have {room}: only one that lacks some can go on",
            param="output_token_ids",
        )


def _check_routed_experts(message: Generate, has_routing: bool) -> None:
    first = message.routed_experts_from
    if first is None:
        return
    if not has_routing:
        raise InvalidRequest(
            "`routed_experts_from` asks for routed experts, which this engine does not report: leave it out, or start "
            "the engine of a model that has experts with `enable_return_routed_experts`",
            param="routed_experts_from",
        )
    num_known = len(message.prompt_token_ids) + len(message.output_token_ids)
    if not 0 <= first <= num_known:
        raise InvalidRequest(
            f"`routed_experts_from` must be between 0 and {num_known}, the number of the tokens that are known, but it "
            f"is {first}",
            param="routed_experts_from",
        )


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    _check_ids("the keys of `logit_bias`", sampling.logit_bias, vocab_size, param="logit_bias")
    bad_words = list(chain.from_iterable(sampling.bad_words))
    _check_ids("the token ids of `bad_words`", bad_words, vocab_size, param="bad_words")
    for name in ("allowed_token_ids", "suppressed_token_ids", "logprob_token_ids", "forced_token_ids"):
        _check_ids(f"`{name}`", getattr(sampling, name), vocab_size, param=name)
    if (thinking := sampling.thinking) is not None:
        single = thinking.end, thinking.forced_end, thinking.interrupts, thinking.forbidden, thinking.answer_header
        ids = list(chain(*single, *thinking.starts))
        _check_ids("the token ids of `thinking`", ids, vocab_size, param="thinking")
    scored = list(chain.from_iterable(sampling.prompt_logprob_token_ids))
    _check_ids("`prompt_logprob_token_ids`", scored, vocab_size, param="prompt_logprob_token_ids")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and not 0 <= count <= vocab_size:
            raise InvalidRequest(
                f"`{name}` must be between 0 and {vocab_size}, the size of the vocabulary, but it is {count}",
                param=name,
            )
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(sampling, name)
        if not math.isfinite(value):
            raise InvalidRequest(f"`{name}` must be a finite number, but it is {value}", param=name)


def _check_ids(what: str, token_ids: Collection[int], vocab_size: int, *, param: str) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise InvalidRequest(f"{what} must be between 0 and {vocab_size - 1}", param=param)
