"""Fields with prompts: one or several, texts or token ids, and `truncate_prompt_tokens` and `truncation_side`, which
limit them.

Holds no state; used by the routes that take texts.
"""

from __future__ import annotations

from typing import Annotated, Protocol, cast

from msgspec import Meta

from eagleray.client.preprocess import Prompt
from eagleray.client.text.tokenizer import TruncationSide
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import MAX_INTEGER
from eagleray.server.service import Service

Prompts = str | list[str | int | list[int]]
PromptField = Annotated[
    Prompts,
    Meta(description="A text, a list of texts, the token ids of one prompt, or a list of those."),
]

TruncationLimit = Annotated[
    Annotated[int, Meta(ge=-1, le=MAX_INTEGER)] | None,
    Meta(description="Keep this many tokens of a longer prompt; -1: as many as leave room for one token."),
]
KeptSide = Annotated[
    TruncationSide | None,
    Meta(
        description="Tokens to keep: right, the first ones; left, the last ones. Default: the last ones, and the "
        "special tokens around a text."
    ),
]


class TruncationFields(Protocol):
    """The fields of a request that limit its prompts."""

    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide | None


def split_prompts(given: Prompts, name: str) -> list[str | list[int]]:
    """Return the prompts of the field `name`, each a text or token ids. Raises `InvalidRequest`."""
    parts = [given] if isinstance(given, str) else given
    if not parts:
        raise InvalidRequest(f"`{name}` is empty; give a text, or token ids", param=name)
    kinds = set(map(type, parts))  # quick even for a million of them
    if int not in kinds:
        return cast("list[str | list[int]]", parts)
    if kinds == {int}:
        return [cast("list[int]", parts)]
    raise InvalidRequest(
        f"`{name}` mixes token ids with whole prompts; put the ids of each prompt into a list of their own", param=name
    )


async def encode_prompt(service: Service, text: str, fields: TruncationFields, *, add_special_tokens: bool) -> Prompt:
    """Return the tokens of a text, with the text itself unless a part is missing. Raises as `TextProcessor.encode`."""
    num_kept = _num_kept(service, fields)
    if num_kept is None:
        return Prompt(text, await service.text.encode(text, add_special_tokens=add_special_tokens))
    return Prompt(
        token_ids=await service.text.encode_part(
            text, num_kept, side=fields.truncation_side, add_special_tokens=add_special_tokens
        )
    )


def limit_token_ids(service: Service, token_ids: list[int], fields: TruncationFields) -> list[int]:
    """Return the token ids of a prompt, or the part of them that the request keeps. Raises `InvalidRequest`."""
    num_kept = _num_kept(service, fields)
    if num_kept is None or len(token_ids) <= num_kept:
        return token_ids
    return token_ids[:num_kept] if fields.truncation_side == "right" else token_ids[len(token_ids) - num_kept :]


def _num_kept(service: Service, fields: TruncationFields) -> int | None:
    """Return the most tokens of a prompt, or None if the request sets no limit of its own."""
    limit = fields.truncate_prompt_tokens
    if limit is None:
        return None
    max_model_len = service.max_model_len
    if limit > max_model_len:
        raise InvalidRequest(
            f"`truncate_prompt_tokens` must be at most {max_model_len}, the model's length (option `max_model_len`), "
            f"but it is {limit}",
            param="truncate_prompt_tokens",
        )
    if limit == -1:
        return max_model_len if service.engine_info.pooling is not None else max_model_len - 1
    return limit
