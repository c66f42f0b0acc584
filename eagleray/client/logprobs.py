"""Log-probabilities in the form that users get: by token id, with the token's text."""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from eagleray.client.outputs import Logprob
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.messages.arrays import Array
from eagleray.messages.outputs import PromptLogprobs, TokenLogprobs

Position = dict[int, Logprob]


class OutputLogprobs:
    """The log-probabilities of a completion's tokens, stored as columns of numbers: with 20 entries for each token,
    objects would take six times the memory."""

    __slots__ = ("_ends", "_logprobs", "_ranks", "_token_ids")

    def __init__(self) -> None:
        self._token_ids = array("q")
        self._logprobs = array("d")
        self._ranks = array("q")
        """Rank of each position's chosen token."""
        self._ends = array("q")
        """Index after the last entry of each position."""

    def extend(self, reported: Iterable[TokenLogprobs]) -> None:
        """Append the next positions."""
        for one in reported:
            self.append(one)

    def append(self, reported: TokenLogprobs) -> None:
        """Append the next position."""
        self._token_ids.extend(reported.token_ids)
        self._logprobs.extend(reported.logprobs)
        self._ranks.append(reported.rank)
        self._ends.append(len(self._token_ids))

    def positions(self, start: int, end: int, *, num_requested: int, tokenizer: Tokenizer | None) -> list[Position]:
        """Return positions `start` to `end` - 1. The last `num_requested` tokens of each were requested by id."""
        return [self._position(index, num_requested, tokenizer) for index in range(start, min(end, len(self._ends)))]

    def truncate(self, num_positions: int) -> None:
        """Drop the positions from `num_positions` on."""
        del self._ends[num_positions:], self._ranks[num_positions:]
        num_entries = self._ends[-1] if self._ends else 0
        del self._token_ids[num_entries:], self._logprobs[num_entries:]

    def cumulative(self) -> float:
        """Return the sum over the chosen tokens."""
        return sum(self._logprobs[self._begin(index)] for index in range(len(self._ends)))

    def _begin(self, index: int) -> int:
        return self._ends[index - 1] if index else 0

    def _position(self, index: int, num_requested: int, tokenizer: Tokenizer | None) -> Position:
        entries = slice(self._begin(index), self._ends[index])
        return _position(
            self._token_ids[entries], self._logprobs[entries], self._ranks[index], num_requested, tokenizer
        )


class PromptPositions(Sequence[Position | None]):
    """The log-probabilities of a prompt by position, which arrive in parts; None for the first token, which nothing
    precedes.

    Each position is built when it is read: those of a long prompt take a hundred times the memory of the numbers.
    """

    def __init__(self, num_prompt_tokens: int, tokenizer: Tokenizer | None, *, num_requested: int = 0) -> None:
        """`num_requested`: number of ids at the end of each position that belong to `requested` alone."""
        self._num_prompt_tokens = num_prompt_tokens
        self._num_requested = num_requested
        self._tokenizer = tokenizer
        self._parts: list[PromptLogprobs] = []
        """Consecutive parts, from position 1 on."""
        self._length = 1

    @property
    def is_complete(self) -> bool:
        return self._length == self._num_prompt_tokens

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Position | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[Position | None]: ...

    def __getitem__(self, index: int | slice) -> Position | list[Position | None] | None:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._length))]
        position = range(self._length)[index]
        if position == 0:
            return None
        part = self._parts[bisect_right(self._parts, position, key=lambda part: part.start) - 1]
        row = position - part.start
        width = part.token_ids.shape[1] - self._num_requested
        token_ids, logprobs = part.token_ids[row, :width].tolist(), part.logprobs[row, :width].tolist()
        return _position(token_ids, logprobs, int(part.ranks[row]), 0, self._tokenizer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def requested(self) -> Array:
        """Return the numbers of the requested ids, [num_positions, num_requested], from position 1 on."""
        parts = [part.logprobs[:, part.logprobs.shape[1] - self._num_requested :] for part in self._parts]
        return np.concatenate([np.empty((0, self._num_requested), np.float32), *parts])

    def append(self, part: PromptLogprobs) -> None:
        """Append the next positions. Positions that are known are not replaced."""
        num_known = self._length - part.start
        assert num_known >= 0, f"prompt logprobs from position {part.start} on, after {self._length} positions"
        if num_known < len(part.ranks):
            rest = PromptLogprobs(
                self._length, part.token_ids[num_known:], part.logprobs[num_known:], part.ranks[num_known:]
            )
            self._parts.append(rest)
            self._length += len(rest.ranks)


def _position(
    token_ids: Sequence[int], logprobs: Sequence[float], rank: int, num_requested: int, tokenizer: Tokenizer | None
) -> Position:
    """Build one position from its columns: the chosen token, the likeliest in order, those requested by id.

    A token is listed once.
    """
    num_top = len(token_ids) - 1 - num_requested
    ranks = [rank, *range(1, num_top + 1), *[None] * num_requested]
    position: Position = {}
    for token_id, logprob, token_rank in zip(token_ids, logprobs, ranks, strict=True):
        if token_id not in position:
            text = None if tokenizer is None else tokenizer.token_to_text(token_id)
            position[token_id] = Logprob(logprob, token_rank, text)
    return position
