"""Checks of the values of requests and other calls, against the model where they depend on it. Pure.

Errors name the field.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from eagleray.config.pooling_spec import POOLS_ONLY, too_long_to_pool
from eagleray.errors import InvalidRequest, PromptTooLong
from eagleray.messages.membership import EngineInfo
from eagleray.messages.sampling import SamplingParams

MAX_TIMEOUT_SECONDS = 31_536_000
"""A year."""


def check_text(value: Any, param: str) -> None:
    """Raise `InvalidRequest` unless `value` is a text that can be encoded as UTF-8."""
    try:
        str.encode(value)
    except TypeError:
        raise InvalidRequest(f"`{param}` must be a text, but it is a {type(value).__name__}", param=param) from None
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{param}` is not valid Unicode: it has half of a surrogate pair", param=param) from None


def check_seconds(timeout: Any) -> None:
    """Raise `InvalidRequest` unless `timeout` is a number of seconds from above 0 to a year."""
    if not (isinstance(timeout, int | float) and 0 < timeout <= MAX_TIMEOUT_SECONDS):
        raise InvalidRequest(
            f"`timeout` must be a number of seconds above 0, at most {MAX_TIMEOUT_SECONDS}, but it is {timeout!r:.50}",
            param="timeout",
        )


def check_common(priority: Any, cache_salt: Any) -> None:
    """Raise `InvalidRequest` unless these fields of a request can be sent."""
    check_text(cache_salt, "cache_salt")
    if not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise InvalidRequest(f"`priority` must be a 64-bit integer, but it is {priority!r}", param="priority")


def check_generates(engine: EngineInfo) -> None:
    """Raise `InvalidRequest` for a pooling model."""
    if engine.pooling is not None:
        raise InvalidRequest(POOLS_ONLY, param="model")


def routed_experts_from(params: SamplingParams, engine: EngineInfo, num_prompt_tokens: int) -> int | None:
    """Return the first position whose routed experts are requested, or None. Raises `InvalidRequest`."""
    start = params.routed_experts_prompt_start
    if not params.return_routed_experts:
        if start:
            raise InvalidRequest(
                f"`routed_experts_prompt_start` is {start}, but the request does not ask for routed experts: add "
                "`return_routed_experts`, or drop it",
                param="routed_experts_prompt_start",
            )
        return None
    if not engine.has_experts:
        raise InvalidRequest(
            f"`return_routed_experts`: the model ({engine.architecture}) has no experts; leave it out",
            param="return_routed_experts",
        )
    if engine.routing is None:
        raise InvalidRequest(
            "`return_routed_experts`: this engine does not keep them; start it with the option "
            "`enable_return_routed_experts`",
            param="return_routed_experts",
        )
    if start > num_prompt_tokens:
        raise InvalidRequest(
            f"`routed_experts_prompt_start` is {start}, but the prompt has {num_prompt_tokens} tokens: it must be at "
            "most that",
            param="routed_experts_prompt_start",
        )
    return start


def check_length(num_tokens: int, engine: EngineInfo) -> None:
    """Raise `PromptTooLong` for a prompt that leaves no room for a token, or that is too long to be pooled."""
    max_model_len = engine.max_model_len
    if engine.pooling is not None:
        if num_tokens > max_model_len:
            raise PromptTooLong(too_long_to_pool(f"it has {num_tokens} tokens", max_model_len), param="prompt")
    elif num_tokens >= max_model_len:
        raise PromptTooLong.for_model(f"it has {num_tokens} tokens", max_model_len)


def check_ids(token_ids: Iterable[Any] | None, vocab_size: int, param: str) -> list[int]:
    """Return the ids as plain integers. Raises `InvalidRequest` for values that are not ids of the model."""
    if token_ids is None:
        return []
    try:
        ids = [operator.index(token_id) for token_id in token_ids]
    except TypeError:
        raise InvalidRequest(f"`{param}`: token ids must be integers", param=param) from None
    check_range(ids, vocab_size, param)
    return ids


def check_range(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raise `InvalidRequest` for the first id that the model does not have."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"`{param}`: token id {wrong} is out of range; the model has the ids 0 to {vocab_size - 1}", param=param
        )
