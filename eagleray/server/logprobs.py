"""Log-probabilities in the two forms of OpenAI's API, and those of a prompt as vLLM gives them.

Pure, but for turns that others get while those of a long prompt are formatted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from eagleray.client.outputs import CompletionDelta, Logprob
from eagleray.client.text.tokenizer import Tokenizer

ENTRIES_AT_ONCE = 1024
"""Log-probabilities that are formatted before the event loop serves others: some milliseconds' work."""

LEAST = -9999.0
"""JSON has no minus infinity, which is the log-probability of a token that was ruled out."""

ENCODER = msgspec.json.Encoder()

Position = Mapping[int, Logprob]
"""By token id: the chosen token first, then the likeliest ones in order, then those that were asked for by id."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, an entry for each token. The prompt's first token, under `echo`, has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extended(self, other: CompletionLogprobs) -> CompletionLogprobs:
        """These, then those of `other`."""
        return CompletionLogprobs(
            *(getattr(self, name) + getattr(other, name) for name in CompletionLogprobs.__struct_fields__)
        )


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobList = list[dict[int, PromptLogprob] | None]
"""For each prompt token, by token id; null for the first, which nothing precedes."""


class EncodedList:
    """A list of JSON, or with `is_msgpack` of msgpack, whose items are encoded as they are added.

    An answer may hold a million log-probabilities. Encoding all of them at once would hold up every other request, and
    as Python objects they would take ten times the memory of their JSON.
    """

    def __init__(self, *, is_msgpack: bool = False) -> None:
        self._is_msgpack = is_msgpack
        self._pieces: list[bytes] = []
        self._length = 0

    def extend(self, items: Sequence[Any]) -> None:
        """Add these items."""
        if items:
            self._length += len(items)
            self._pieces.append(_msgpack_items(items) if self._is_msgpack else ENCODER.encode(items)[1:-1])

    def pop(self) -> Any:
        """Return the list, for a field of an answer of any type, and forget the items."""
        pieces, self._pieces = self._pieces, []
        if self._is_msgpack:
            return msgspec.Raw(b"".join([_msgpack_header(self._length), *pieces]))
        return msgspec.Raw(b"".join([b"[", b",".join(pieces), b"]"]))


def completion_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position | None], k: int, offset: int, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """The form of /v1/completions. `offset` is where the first token begins in the text."""
    logprobs = CompletionLogprobs([], [], [], [])
    for token_id, position in zip(token_ids, positions, strict=True):
        text = tokenizer.token_to_text(token_id)
        logprobs.text_offset.append(offset)
        logprobs.tokens.append(text)
        logprobs.token_logprobs.append(None if position is None else _finite(position[token_id]))
        logprobs.top_logprobs.append(None if position is None else _top_by_text(token_id, position, k, tokenizer))
        offset += len(text)
    return logprobs


def chat_logprobs(delta: CompletionDelta, k: int, tokenizer: Tokenizer | None) -> ChatLogprobs:
    """Return the log-probabilities of a delta in the form of /v1/chat/completions.

    Without a tokenizer a token is shown as `token_id:ID`.
    """
    content = []
    for token_id, position in zip(delta.token_ids, delta.logprobs or (), strict=True):
        chosen = _entry(token_id, position, tokenizer)
        top = [_entry(other, position, tokenizer) for other in _top(token_id, position, k)]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


class LogprobsCollector:
    """Puts the log-probabilities of one whole completion together from its parts, each encoded when it is added.

    `form` is the struct of the API: its required fields are lists, which grow.
    """

    def __init__(self, form: type[msgspec.Struct], *, is_msgpack: bool) -> None:
        self._form = form
        self._columns = {
            field.name: EncodedList(is_msgpack=is_msgpack) for field in msgspec.structs.fields(form) if field.required
        }

    def add(self, logprobs: msgspec.Struct) -> None:
        for name, column in self._columns.items():
            column.extend(getattr(logprobs, name))

    def result(self) -> msgspec.Struct:
        """Return all of them in one struct. To be called once."""
        return self._form(**{name: column.pop() for name, column in self._columns.items()})


async def encoded_prompt_logprobs(
    positions: Sequence[Position | None], k: int, *, is_msgpack: bool = False
) -> PromptLogprobList:
    """Return the log-probabilities of a prompt as vLLM gives them, encoded already."""
    encoded = EncodedList(is_msgpack=is_msgpack)
    for start, end in slices(len(positions), k):
        part = positions[start:end]
        encoded.extend([None if position is None else _by_token_id(position, k) for position in part])
        await asyncio.sleep(0)
    result: PromptLogprobList = encoded.pop()
    return result


def slices(num_positions: int, k: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of pieces of `num_positions`, of `k` + 1 log-probabilities each, that are formatted at once."""
    step = max(1, ENTRIES_AT_ONCE // (1 + k))
    return pairwise([*range(0, num_positions, step), num_positions])


def _by_token_id(position: Position, k: int) -> dict[int, PromptLogprob]:
    chosen = next(iter(position))
    entries = {token_id: position[token_id] for token_id in [chosen, *_top(chosen, position, k)]}
    return {
        token_id: PromptLogprob(_finite(entry), entry.rank, entry.decoded_token) for token_id, entry in entries.items()
    }


def _top(chosen: int, position: Position, k: int) -> list[int]:
    """The `k` likeliest, in order, then the ids that were asked for."""
    ranked = sorted((entry.rank, token_id) for token_id, entry in position.items() if entry.rank is not None)
    likeliest = [token_id for rank, token_id in ranked if rank <= k]
    asked = [token_id for token_id, entry in position.items() if entry.rank is None and token_id != chosen]
    return likeliest + asked


def _top_by_text(chosen: int, position: Position, k: int, tokenizer: Tokenizer) -> dict[str, float]:
    entries: dict[str, float] = {}
    for token_id in [*_top(chosen, position, k), chosen]:
        # Different ids may have the same text, as parts of characters do: the likelier one, which comes first, stays.
        entries.setdefault(tokenizer.token_to_text(token_id), _finite(position[token_id]))
    return entries


def _entry(token_id: int, position: Position, tokenizer: Tokenizer | None) -> TokenLogprob:
    logprob = _finite(position[token_id])
    if tokenizer is None:
        return TokenLogprob(f"token_id:{token_id}", logprob, None)
    return TokenLogprob(tokenizer.token_to_text(token_id), logprob, list(tokenizer.token_bytes(token_id)))


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)


def _msgpack_items(items: Sequence[Any]) -> bytes:
    return msgspec.msgpack.encode(items)[len(_msgpack_header(len(items))) :]


def _msgpack_header(length: int) -> bytes:
    """Return the bytes that precede the items of an array of that length."""
    if length < 2**4:
        return bytes([0x90 | length])
    return b"\xdc" + length.to_bytes(2) if length < 2**16 else b"\xdd" + length.to_bytes(4)
