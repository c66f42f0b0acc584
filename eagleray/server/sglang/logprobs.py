"""Log-probabilities in the form of SGLang: `[logprob, token id, text or null]` for each token. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from eagleray.client.outputs import Logprob
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.server.logprobs import LEAST

TokenEntry = tuple[float | None, int, str | None]
"""Log-probability, token id, and the text if requested. The prompt's first token has no log-probability."""

ENCODER = msgspec.json.Encoder()


class SGLangLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists with an entry for each token."""

    tokens: list[TokenEntry]
    top: list[list[TokenEntry] | None]
    """The likeliest tokens in order."""
    asked: list[list[TokenEntry] | None]
    """The tokens that were requested by id."""


class EntryFormat:
    """Form of the entries of one request. `tokenizer`: None for entries without a text."""

    def __init__(self, *, top: int, asked: Sequence[int], tokenizer: Tokenizer | None) -> None:
        self._top = top
        self._asked = asked
        self._tokenizer = tokenizer

    def format(self, token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob] | None]) -> SGLangLogprobs:
        """Return the entries of tokens. `positions`: log-probabilities by token id, None for a token without them."""
        logprobs = SGLangLogprobs([], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            if position is None:
                logprobs.tokens.append((None, token_id, self._text(token_id)))
                logprobs.top.append(None)
                logprobs.asked.append(None)
                continue
            ranked = sorted((entry.rank, one) for one, entry in position.items() if entry.rank is not None)
            logprobs.tokens.append(self._entry(token_id, position))
            logprobs.top.append([self._entry(one, position) for rank, one in ranked if rank <= self._top])
            logprobs.asked.append([self._entry(one, position) for one in self._asked if one in position])
        return logprobs

    def _entry(self, token_id: int, position: Mapping[int, Logprob]) -> TokenEntry:
        return max(position[token_id].logprob, LEAST), token_id, self._text(token_id)

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_to_text(token_id)


class GrowingList:
    """A list that is shown again and again while it grows. Its items are encoded once."""

    def __init__(self) -> None:
        self._encoded = bytearray()

    def extend(self, items: Sequence[Any]) -> None:
        if items:
            if self._encoded:
                self._encoded += b","
            self._encoded += ENCODER.encode(items)[1:-1]

    @property
    def value(self) -> Any:
        """The list as the value of a field of any type."""
        return msgspec.Raw(b"[" + self._encoded + b"]")
