"""Log-probabilities in the two forms of OpenAI's API, and by token id as vLLM gives them.

Pure, except that the event loop serves others while those of a long prompt are formatted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from eagleray.client.outputs import CompletionDelta, Logprob
from eagleray.client.text.tokenizer import Tokenizer

ENTRIES_AT_ONCE = 1024
"""Number of log-probabilities that are formatted before the event loop serves others: some milliseconds' work."""

LEAST = -9999.0
"""Stand-in for minus infinity, the log-probability or logit of a dropped token: JSON has no infinity."""

ENCODER = msgspec.json.Encoder()

Position = Mapping[int, Logprob]
"""Log-probabilities by token id: the chosen token, then the likeliest in order, then tokens that were asked for."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists with an entry for each token. The prompt's first token, under `echo`, has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extended(self, other: CompletionLogprobs) -> CompletionLogprobs:
        """Return these log-probabilities followed by those of `other`."""
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


class TokenIdLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    rank: int | None
    """None for a token that was reported only because its id was asked for."""


class SampledTokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[TokenIdLogprob]
    """The sampled token, then the likeliest others in order, then those asked for by id."""


class GenerateLogprobs(msgspec.Struct, frozen=True):
    content: list[SampledTokenLogprob]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobList = list[dict[int, PromptLogprob] | None]
"""Log-probabilities by token id for each prompt token; null for the first, which nothing precedes."""


class EncodedList:
    """A list whose items are encoded when they are added, as JSON or, with `is_msgpack`, as msgpack.

    An answer may hold a million log-probabilities. Encoding all of them at once would hold up every other request, and
    as Python objects they would take ten times the memory of their JSON.
    """

    def __init__(self, *, is_msgpack: bool = False) -> None:
        self._is_msgpack = is_msgpack
        self._pieces: list[bytes] = []
        self._length = 0

    def extend(self, items: Sequence[Any]) -> None:
        if items:
            self._length += len(items)
            self._pieces.append(_msgpack_items(items) if self._is_msgpack else ENCODER.encode(items)[1:-1])

    def pop(self) -> Any:
        """Return the list as the value of a field of any type, and forget the items."""
        pieces, self._pieces = self._pieces, []
        if self._is_msgpack:
            return msgspec.Raw(b"".join([_msgpack_header(self._length), *pieces]))
        return msgspec.Raw(b"".join([b"[", b",".join(pieces), b"]"]))


def token_id_name(token_id: int) -> str:
    """Return the name of a token in answers that name tokens by their ids, since several may have the same text."""
    return f"token_id:{token_id}"


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[Position | None],
    k: int,
    offset: int,
    tokenizer: Tokenizer,
    *,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Return log-probabilities in the form of /v1/completions.

    `offset`: position of the first token in the text. `as_ids`: whether tokens are named by their ids.
    """
    name = token_id_name if as_ids else tokenizer.token_to_text
    logprobs = CompletionLogprobs([], [], [], [])
    for token_id, position in zip(token_ids, positions, strict=True):
        logprobs.text_offset.append(offset)
        logprobs.tokens.append(name(token_id))
        logprobs.token_logprobs.append(None if position is None else _finite(position[token_id]))
        logprobs.top_logprobs.append(None if position is None else _top_by_name(token_id, position, k, name))
        offset += len(tokenizer.token_to_text(token_id))
    return logprobs


def chat_logprobs(delta: CompletionDelta, k: int, tokenizer: Tokenizer, *, as_ids: bool = False) -> ChatLogprobs:
    """Return the log-probabilities of a delta in the form of /v1/chat/completions. `as_ids`: as above."""
    content = []
    for token_id, position in zip(delta.token_ids, delta.logprobs or (), strict=True):
        chosen = _entry(token_id, position, tokenizer, as_ids)
        top = [_entry(other, position, tokenizer, as_ids) for other in _top(token_id, position, k)]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def generate_logprobs(delta: CompletionDelta, k: int) -> GenerateLogprobs:
    """Return the log-probabilities of a delta in the form of /inference/v1/generate."""
    content = []
    for token_id, position in zip(delta.token_ids, delta.logprobs or (), strict=True):
        others = [other for other in _top(token_id, position, k) if other != token_id]
        top = [TokenIdLogprob(one, _finite(position[one]), position[one].rank) for one in (token_id, *others)]
        content.append(SampledTokenLogprob(token_id, top[0].logprob, top[0].rank, top))
    return GenerateLogprobs(content)


class LogprobsCollector:
    """Collects the log-probabilities of a whole completion from its deltas, and encodes each at once.

    `form`: struct of the API, whose required fields are lists.
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
        """Return them all as a `form`. To be called once."""
        return self._form(**{name: column.pop() for name, column in self._columns.items()})


async def encoded_prompt_logprobs(
    positions: Sequence[Position | None], k: int, *, is_msgpack: bool = False
) -> PromptLogprobList:
    """Return the log-probabilities of a prompt in the form of vLLM, already encoded."""
    encoded = EncodedList(is_msgpack=is_msgpack)
    for start, end in slices(len(positions), k):
        part = positions[start:end]
        encoded.extend([None if position is None else _by_token_id(position, k) for position in part])
        await asyncio.sleep(0)
    result: PromptLogprobList = encoded.pop()
    return result


def slices(num_positions: int, k: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the pieces of `num_positions`, of `k` + 1 log-probabilities each, to format at once."""
    step = max(1, ENTRIES_AT_ONCE // (1 + k))
    return pairwise([*range(0, num_positions, step), num_positions])


def _by_token_id(position: Position, k: int) -> dict[int, PromptLogprob]:
    chosen = next(iter(position))
    entries = {token_id: position[token_id] for token_id in [chosen, *_top(chosen, position, k)]}
    return {
        token_id: PromptLogprob(_finite(entry), entry.rank, entry.decoded_token) for token_id, entry in entries.items()
    }


def _top(chosen: int, position: Position, k: int) -> list[int]:
    """Return the ids of the `k` likeliest tokens in order, then the ids that were asked for."""
    ranked = sorted((entry.rank, token_id) for token_id, entry in position.items() if entry.rank is not None)
    likeliest = [token_id for rank, token_id in ranked if rank <= k]
    asked = [token_id for token_id, entry in position.items() if entry.rank is None and token_id != chosen]
    return likeliest + asked


def _top_by_name(chosen: int, position: Position, k: int, name: Callable[[int], str]) -> dict[str, float]:
    entries: dict[str, float] = {}
    for token_id in [*_top(chosen, position, k), chosen]:
        # Ids may have the same text, as parts of characters have: the likelier one comes first, and stays.
        entries.setdefault(name(token_id), _finite(position[token_id]))
    return entries


def _entry(token_id: int, position: Position, tokenizer: Tokenizer, as_ids: bool) -> TokenLogprob:
    logprob = _finite(position[token_id])
    name = token_id_name(token_id) if as_ids else tokenizer.token_to_text(token_id)
    return TokenLogprob(name, logprob, list(tokenizer.token_bytes(token_id)))


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)


def _msgpack_items(items: Sequence[Any]) -> bytes:
    return msgspec.msgpack.encode(items)[len(_msgpack_header(len(items))) :]


def _msgpack_header(length: int) -> bytes:
    """Return the bytes that precede the items of an array of that length."""
    if length < 2**4:
        return bytes([0x90 | length])
    return b"\xdc" + length.to_bytes(2) if length < 2**16 else b"\xdd" + length.to_bytes(4)
