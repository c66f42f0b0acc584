"""How many tokens a request took: for its end, and for its events so far."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from eagleray.server.fields import StreamOptions
from eagleray.server.generation import TokenTotals


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Prompt tokens that did not have to be computed: the prefix cache had them."""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def total_usage(totals: TokenTotals) -> Usage:
    """The usage of all prompts together."""
    num_prompt, num_completion = totals.num_prompt_tokens, totals.num_completion_tokens
    details = PromptTokensDetails(totals.num_cached_tokens)
    return Usage(num_prompt, num_completion, num_prompt + num_completion, details)


def usage_so_far(options: StreamOptions, totals: TokenTotals) -> Usage | UnsetType | None:
    """What an event says that is not the last one: null if the last one will say it, as OpenAI's API does."""
    if options.continuous_usage_stats:
        return total_usage(totals)
    return None if options.include_usage else UNSET
