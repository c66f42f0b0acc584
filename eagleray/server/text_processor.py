"""Conversion of texts to token ids and back, in pieces or in threads where it would take long. Owned by `Service`.

The event loop serves every request, and the thread that sends this process's heartbeat needs Python's lock: neither may
wait until a text of megabytes is tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from eagleray.client.text.chat_template import OverBudget, RenderBudget
from eagleray.client.text.conversation import check_messages
from eagleray.client.text.tokenizer import Tokenizer, TruncationSide
from eagleray.config.pooling_spec import too_long_to_pool
from eagleray.errors import InvalidRequest, PromptTooLong
from eagleray.server.timeouts import INLINE_RENDER_SECONDS

T = TypeVar("T")

INLINE_CHARS = 4096
"""Length up to which a text is tokenized in the event loop, within about a millisecond."""
INLINE_MESSAGES = 64

PIECE_CHARS = 2**16
"""Length of the pieces of a long text: tokenizing one takes some 50 ms. Between two, a disconnect is noticed."""
PIECE_MARGIN_TOKENS = 16
"""Tokens that a cut between two pieces may add."""

UNKNOWN_MODEL_LEN = 2**17
"""Model length that is assumed before the first engine has joined."""
UTILITY_TOKENS = 2**17
"""Lowest limit of /tokenize and /detokenize: half a second of work, and 100 MB."""


class TextProcessor:
    """Tokenizes, detokenizes, and renders chat templates.

    `max_model_len` returns the model's length in tokens, or None before the first engine has joined; `pools`
    returns whether the model is a pooling model. `template_seconds` is the longest time of a chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: Callable[[], int | None],
        pools: Callable[[], bool],
        template_seconds: float,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._pools = pools
        self._template_seconds = template_seconds
        # One thread each, so that any number of long texts leaves the rest of the machine to other requests.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="render")

    @property
    def utility_tokens(self) -> int:
        """Most tokens of /tokenize and /detokenize. Not less than `UTILITY_TOKENS`, because users call these routes to
        find out whether a text is too long."""
        return max(self._model_len, UTILITY_TOKENS)

    async def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of `text`. `max_tokens`: by default the model's length.

        Raises `PromptTooLong` for a text that clearly has more tokens, before the text is tokenized, and
        `InvalidRequest` as `Tokenizer.encode` does.
        """
        limit = self._model_len if max_tokens is None else max_tokens
        self._check_chars(len(text), limit)
        encode = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        if len(text) <= INLINE_CHARS:
            return encode()
        if len(text) > PIECE_CHARS:
            await self._check_tokens(text, limit)
        return await self._in_thread(self._tokenizing, encode)

    async def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text that the model has written, without special ones."""
        count = partial(self._tokenizer.count_tokens, text)
        return count() if len(text) <= INLINE_CHARS else await self._in_thread(self._tokenizing, count)

    async def encode_part(
        self, text: str, max_tokens: int, *, side: TruncationSide | None, add_special_tokens: bool
    ) -> list[int]:
        """Return the token ids of the part of `text` that is kept, see `Tokenizer.encode_part`."""
        encode = partial(
            self._tokenizer.encode_part, text, max_tokens, side=side, add_special_tokens=add_special_tokens
        )
        return encode() if len(text) <= INLINE_CHARS else await self._in_thread(self._tokenizing, encode)

    async def offsets(self, text: str, token_ids: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the place of each token in `text`, see `Tokenizer.offsets`."""
        return await self._in_thread(self._tokenizing, partial(self._tokenizer.offsets, text, token_ids))

    def check_decodable(self, num_tokens: int) -> None:
        """Raise `PromptTooLong` for more than `utility_tokens`."""
        if num_tokens > self.utility_tokens:
            raise PromptTooLong(
                f"there are {num_tokens} tokens, but at most {self.utility_tokens} are taken at a time: send fewer",
                param="tokens",
            )

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. Raises `InvalidRequest` as `Tokenizer.decode` does."""
        decode = partial(self._tokenizer.decode, token_ids, skip_special_tokens=False)
        return decode() if len(token_ids) <= INLINE_CHARS else await self._in_thread(self._tokenizing, decode)

    def check_num_messages(self, count: int) -> None:
        """Raise `PromptTooLong` for a conversation of more messages than the model's length has tokens."""
        if count > self._model_len:
            raise PromptTooLong.for_model(
                f"{count} messages have more tokens than that", self._model_len, param="messages"
            )

    def check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise as `check_num_messages`, and `InvalidRequest` for a message that no template could show."""
        self.check_num_messages(len(messages))
        check_messages(messages)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
        chat_template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """Return the prompt that the chat template makes of `messages`, which were checked.

        Raises `PromptTooLong` for messages that cannot fit into the model's length, and `InvalidRequest` if the
        template refuses them or takes too long.
        """
        num_chars = sum(map(_content_chars, messages))
        self._check_chars(num_chars, self._model_len)
        is_short = not (chat_template or tools or documents) and num_chars <= INLINE_CHARS
        is_short = is_short and len(messages) <= INLINE_MESSAGES and all(map(_is_plain, messages))
        render = partial(
            self._tokenizer.apply_chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            chat_template=chat_template,
            tools=tools,
            documents=documents,
        )
        if is_short:
            try:
                return render(budget=self._budget(INLINE_RENDER_SECONDS))
            except OverBudget:
                pass
        return await self._render_in_thread(render)

    async def _render_in_thread(self, render: Callable[..., str]) -> str:
        budget = self._budget(self._template_seconds)
        try:
            return await self._in_thread(self._rendering, partial(render, budget=budget))
        except asyncio.CancelledError:
            budget.cancel()
            raise
        except OverBudget as error:
            raise InvalidRequest(
                f"the chat template was given up: {error}; send a shorter conversation, or raise the option "
                "`chat_template_timeout` or `max_model_len`",
                param="messages",
            ) from None

    def _budget(self, seconds: float) -> RenderBudget:
        return RenderBudget(seconds=seconds, max_chars=self._model_len * self._tokenizer.max_token_chars)

    @property
    def _model_len(self) -> int:
        return self._max_model_len() or UNKNOWN_MODEL_LEN

    def _check_chars(self, num_chars: int, max_tokens: int) -> None:
        longest = self._tokenizer.max_token_chars
        if num_chars > max_tokens * longest:
            raise self._too_long(
                f"{num_chars} characters cannot be fewer tokens, because no token stands for more than {longest}",
                max_tokens,
            )

    async def _check_tokens(self, text: str, max_tokens: int) -> None:
        """Count the tokens of the pieces of `text` until there are clearly too many, and raise `PromptTooLong` then."""
        num_tokens = 0
        for num_pieces, start in enumerate(range(0, len(text), PIECE_CHARS), 1):
            end = min(start + PIECE_CHARS, len(text))
            count = partial(self._tokenizer.count_tokens, text[start:end])
            num_tokens += await self._in_thread(self._tokenizing, count)
            if num_tokens > max_tokens + PIECE_MARGIN_TOKENS * num_pieces:
                raise self._too_long(
                    f"the first {end} of its {len(text)} characters have about {num_tokens} tokens", max_tokens
                )

    def _too_long(self, cause: str, max_tokens: int) -> PromptTooLong:
        if max_tokens == self._model_len:
            if self._pools():
                return PromptTooLong(too_long_to_pool(cause, max_tokens), param="prompt")
            return PromptTooLong.for_model(cause, max_tokens)
        return PromptTooLong(
            f"the text is too long, because at most {max_tokens} tokens are taken at a time: {cause}", param="prompt"
        )

    async def _in_thread(self, threads: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, function)


def _content_chars(message: Mapping[str, Any]) -> int:
    """Return the length of a message's text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(part if isinstance(part, str) else part["text"]) for part in content)


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Whether a message has no more than a role, a content and short texts."""
    return len(message) <= 2 or all(
        value is None or name == "content" or (isinstance(value, str) and len(value) <= INLINE_CHARS // INLINE_MESSAGES)
        for name, value in message.items()
    )
