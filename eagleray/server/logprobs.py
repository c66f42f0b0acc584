"""Log-probabilities in the two forms of OpenAI's API, and as vLLM gives those of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from eagleray.client.outputs import Logprob
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.server.encoded_list import EncodedList

ENTRIES_AT_ONCE = 1024
"""Log-probabilities that are formatted before the event loop serves others: some milliseconds' work."""

LEAST = -9999.0
"""JSON has no minus infinity, which is the log-probability of a token that was ruled out."""

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


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position], k: int, tokenizer: Tokenizer | None
) -> ChatLogprobs:
    """The form of /v1/chat/completions. Without a tokenizer a token is shown as `token_id:ID`."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        chosen = _entry(token_id, position, tokenizer)
        top = [_entry(other, position, tokenizer) for other in _top(token_id, position, k)]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


class ChatLogprobsCollector:
    """Puts the log-probabilities of one whole completion together from its parts, in the form of chat."""

    def __init__(self, *, is_msgpack: bool = False) -> None:
        self._content = EncodedList(is_msgpack=is_msgpack)

    def add(self, logprobs: ChatLogprobs) -> None:
        self._content.extend(logprobs.content)

    def take(self) -> ChatLogprobs:
        return ChatLogprobs(self._content.take())


class CompletionLogprobsCollector:
    """Puts the log-probabilities of one whole completion together from its parts, in the form of /v1/completions."""

    def __init__(self) -> None:
        self._columns = {name: EncodedList() for name in CompletionLogprobs.__struct_fields__}

    def add(self, logprobs: CompletionLogprobs) -> None:
        for name, column in self._columns.items():
            column.extend(getattr(logprobs, name))

    def take(self) -> CompletionLogprobs:
        return CompletionLogprobs(**{name: column.take() for name, column in self._columns.items()})


async def encoded_prompt_logprobs(
    positions: Sequence[Position | None], k: int, *, is_msgpack: bool = False
) -> PromptLogprobList:
    """Return the log-probabilities of a prompt as vLLM gives them, encoded already."""
    encoded = EncodedList(is_msgpack=is_msgpack)
    for start, end in slices(len(positions), k):
        part = positions[start:end]
        encoded.extend([None if position is None else _by_token_id(position, k) for position in part])
        await asyncio.sleep(0)
    result: PromptLogprobList = encoded.take()
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
