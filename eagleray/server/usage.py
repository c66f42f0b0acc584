"""How many tokens a request took: for its end, and for its events so far."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from eagleray.server.fields import StreamOptions
from eagleray.server.generation import Generation

__all__ = ["PromptTokensDetails", "Usage", "total_usage", "usage_so_far"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Prompt tokens that did not have to be computed: the prefix cache had them."""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def total_usage(generations: Sequence[Generation]) -> Usage:
    """Of all prompts together."""
    num_prompt = sum(len(generation.prompt_token_ids) for generation in generations)
    num_completion = sum(generation.num_completion_tokens for generation in generations)
    num_cached = sum(generation.num_cached_tokens for generation in generations)
    return Usage(num_prompt, num_completion, num_prompt + num_completion, PromptTokensDetails(num_cached))


def usage_so_far(options: StreamOptions, generations: Sequence[Generation]) -> Usage | UnsetType | None:
    """What an event says that is not the last one: null if the last one will say it, as OpenAI's API does."""
    if options.continuous_usage_stats:
        return total_usage(generations)
    return None if options.include_usage else UNSET
