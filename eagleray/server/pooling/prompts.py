"""The prompts of requests to pooling models: of texts, token ids and conversations, and of pairs of texts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eagleray.client.pooling import pair_messages
from eagleray.client.preprocess import POOLED, Prompt
from eagleray.client.text.tokenizer import TruncationSide
from eagleray.errors import InvalidRequest
from eagleray.server.chat_messages import MAX_TEMPLATE_VARIABLES, TemplateFields, check_template_fields, render_chat
from eagleray.server.fields import Prompts, TruncationFields, split_prompts
from eagleray.server.service import Service

TEXTS_AT_ONCE = 16
"""Number of short texts that are tokenized before the event loop serves others."""


PlaceOf = Callable[[int], str]
"""Returns the place of a prompt in the body, such as `input[3]`, by its number in the request."""


@contextlib.contextmanager
def naming_place(place_of: PlaceOf, index: int) -> Iterator[None]:
    """Name the place of a prompt in the errors about it that are raised in the block."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != "prompt":
            raise
        place, message = place_of(index), str(error)
        named = message.replace("`prompt`", f"`{place}`", 1) if "`prompt`" in message else f"`{place}`: {message}"
        raise type(error)(named, param=place) from None


class PromptsBody(TruncationFields, Protocol):
    """The fields of a request that hold its prompts."""

    input: Prompts | None
    messages: list[dict[str, Any]] | None
    add_special_tokens: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    chat_template: str | None


@dataclass(slots=True)
class _ChatOptions(TemplateFields):
    """Fields of a conversation that gets a vector."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    chat_template: str | None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class PairFieldsOfPrompts(TruncationFields, Protocol):
    """The fields of a request that determine how pairs of texts become prompts."""

    instruction: str | None
    chat_template_kwargs: dict[str, Any] | None


@dataclass(slots=True)
class _KeptTokens(TruncationFields):
    """Limit of the tokens of a prompt. As in vLLM, pooling models keep the first ones by default."""

    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide | None

    @classmethod
    def of(cls, given: TruncationFields) -> _KeptTokens:
        return cls(given.truncate_prompt_tokens, given.truncation_side or "right")


class PromptMaker:
    """The prompts of one request. Raises `InvalidRequest` for fields that contradict each other."""

    def __init__(self, service: Service, body: PromptsBody) -> None:
        if (body.input is None) == (body.messages is None):
            raise InvalidRequest("give either `input` or `messages`", param="input")
        self._service = service
        self._body = body
        self._parts = [] if body.input is None else split_prompts(body.input, "input")
        self._chat = _ChatOptions(
            bool(body.add_generation_prompt),  # chat has another default
            body.continue_final_message,
            body.chat_template_kwargs,
            body.chat_template,
        )
        if body.messages is not None:
            check_template_fields(service, self._chat)
        if body.messages is not None or any(isinstance(part, str) for part in self._parts):
            service.check_tokenizer()

    @property
    def num_prompts(self) -> int:
        return len(self._parts) or 1

    def place(self, index: int) -> str:
        """Return the place of a prompt in the body."""
        if self._body.messages is not None:
            return "messages"
        return f"input[{index}]" if len(self._parts) > 1 else "input"

    async def make(self) -> list[Prompt]:
        body = self._body
        if body.messages is None:
            special = body.add_special_tokens is not False
            return await encode_prompts(self._service, self._parts, body, special, self.place)
        self._service.text.check_messages(body.messages)
        text = await render_chat(self._service, body.messages, self._chat)
        return await encode_prompts(self._service, [text], body, bool(body.add_special_tokens), self.place)


async def encode_prompts(
    service: Service,
    parts: Sequence[str | list[int]],
    limits: TruncationFields,
    add_special_tokens: bool,
    place_of: PlaceOf,
) -> list[Prompt]:
    """Return the prompts of texts and token ids, as much of each as `limits` allow."""
    kept = _KeptTokens.of(limits)
    prompts = []
    for index, part in enumerate(parts):
        with naming_place(place_of, index):
            if isinstance(part, str):
                prompts.append(await service.encode_prompt(part, kept, add_special_tokens=add_special_tokens))
            else:
                prompts.append(Prompt(token_ids=service.limit_token_ids(part, kept)))
        if len(prompts) % TEXTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return prompts


async def encode_pairs(
    service: Service,
    pairs: Sequence[tuple[str, str]],
    body: PairFieldsOfPrompts,
    place_of: PlaceOf,
    *,
    has_template: bool,
) -> list[Prompt]:
    """Return a prompt for each pair: both texts in one, joined by the template if the server was given one.

    Only one joined text exists at a time, and the tokens are counted meanwhile: one long text and many short ones make
    far more than the body of the request has. Raises `InvalidRequest` for too many.
    """
    variables = _pair_variables(body, has_template=has_template)
    kept = _KeptTokens.of(body)
    prompts: list[Prompt] = []
    for index, (first, second) in enumerate(pairs):
        text = first + second
        if has_template:
            text = await service.text.render(
                pair_messages(first, second),
                add_generation_prompt=False,
                continue_final_message=False,
                chat_template_kwargs=variables,
                chat_template=None,
                tools=None,
                documents=None,
            )
        with naming_place(place_of, index):
            prompt = await service.encode_prompt(text, kept, add_special_tokens=True)
        prompts.append(Prompt(token_ids=prompt.token_ids))
        if len(prompts) % TEXTS_AT_ONCE == 0:
            service.admission.check_size([one.token_ids or [] for one in prompts], POOLED, service.max_model_len)
            await asyncio.sleep(0)
    return prompts


def _pair_variables(body: PairFieldsOfPrompts, *, has_template: bool) -> dict[str, Any]:
    """Return the variables of the request for the template. Raises `InvalidRequest` if there is no template."""
    variables = dict(body.chat_template_kwargs or {})
    if body.instruction is not None:
        variables.setdefault("instruction", body.instruction)
    if variables and not has_template:
        raise InvalidRequest(
            f"`{'instruction' if body.instruction else 'chat_template_kwargs'}` is for the template that joins two "
            "texts, and this server has none (option `chat_template`): write it into the texts",
            param="instruction",
        )
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        raise InvalidRequest(
            f"`chat_template_kwargs` may have at most {MAX_TEMPLATE_VARIABLES} entries", param="chat_template_kwargs"
        )
    return variables
