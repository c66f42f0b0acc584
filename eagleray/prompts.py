"""Prompts as users of the Python API write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from eagleray.client.preprocess import Prompt
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.errors import InvalidRequest, UserError
from eagleray.row_errors import name_row


class TextPrompt(TypedDict):
    """A prompt of text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptLike = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}` with an optional `cache_salt`."""

PromptType = PromptLike
"""The same, under the name of vLLM."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each `{"role", "content"}`."""

PROMPT_FIELDS = {"prompt", "prompt_token_ids", "cache_salt"}


class ParsedPrompt(NamedTuple):
    prompt: Prompt
    cache_salt: str


def parse_prompt(prompt: PromptLike) -> ParsedPrompt:
    """Return the parts of a prompt. Raises `InvalidRequest` for other types, and for unknown fields that are set."""
    match prompt:
        case str():
            return ParsedPrompt(Prompt(text=prompt), "")
        case Mapping():
            if unknown := {name for name, value in prompt.items() if value is not None} - PROMPT_FIELDS:
                raise InvalidRequest(f"a prompt has no field {sorted(unknown)[0]!r}", param="prompt")
            ids = prompt.get("prompt_token_ids")
            parsed = Prompt(prompt.get("prompt"), None if ids is None else _token_ids(ids))
            return ParsedPrompt(parsed, prompt.get("cache_salt") or "")
        case _:
            return ParsedPrompt(Prompt(token_ids=_token_ids(prompt)), "")


def _token_ids(ids: Any) -> list[int]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise InvalidRequest(
            f"a prompt is a text, a list of token ids, or a dictionary with one of them, but got {type(ids).__name__}",
            param="prompt",
        )
    return list(ids)


def as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> Sequence[PromptLike]:
    """Return a list of prompts, given one or several."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def one_for_each(values: Any, count: int, name: str) -> Sequence[Any]:
    """Return a value for each of `count` prompts, given one for all or a sequence of that length."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise InvalidRequest(f"`{name}` has {len(values)} entries for {count} prompts", param=name)
    return values


def chat_prompts(
    messages: Conversation | Sequence[Conversation],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[PromptLike]:
    """Render one conversation or several with the model's chat template. `tools`: shown to the model."""
    conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
    prompts: list[PromptLike] = []
    for index, conversation in enumerate(conversations):
        try:
            text = tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools or None,
            )
        except UserError as error:
            raise name_row(error, index, is_one_of_several=len(conversations) > 1) from None
        prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
    return prompts
