"""Log-probabilities as users get them: by token id, with the token's text."""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import overload

from eagleray.client.outputs import Logprob
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.messages.outputs import PromptLogprobs, TokenLogprobs

Position = dict[int, Logprob]


class OutputLogprobs:
    """The log-probabilities of a completion's tokens, as columns of numbers: with 20 for each token, objects would take
    six times the memory."""

    __slots__ = ("_ends", "_logprobs", "_ranks", "_token_ids")

    def __init__(self) -> None:
        self._token_ids = array("q")
        self._logprobs = array("d")
        self._ranks = array("q")
        """Rank of each position's chosen token."""
        self._ends = array("q")
        """Place behind the last entry of each position."""

    def extend(self, reported: Iterable[TokenLogprobs]) -> None:
        """Add the next positions."""
        for one in reported:
            self._token_ids.extend(one.token_ids)
            self._logprobs.extend(one.logprobs)
            self._ranks.append(one.rank)
            self._ends.append(len(self._token_ids))

    def positions(self, start: int, end: int, *, num_asked: int, tokenizer: Tokenizer | None) -> list[Position]:
        """Positions `start` to `end` - 1. The last `num_asked` tokens of each were asked for by id."""
        return [self._position(place, num_asked, tokenizer) for place in range(start, min(end, len(self._ends)))]

    def cut(self, num_positions: int) -> None:
        """Drop all but the first positions."""
        del self._ends[num_positions:], self._ranks[num_positions:]
        num_entries = self._ends[-1] if self._ends else 0
        del self._token_ids[num_entries:], self._logprobs[num_entries:]

    def cumulative(self) -> float:
        """Sum over the chosen tokens."""
        return sum(self._logprobs[self._begin(place)] for place in range(len(self._ends)))

    def _begin(self, place: int) -> int:
        return self._ends[place - 1] if place else 0

    def _position(self, place: int, num_asked: int, tokenizer: Tokenizer | None) -> Position:
        entries = slice(self._begin(place), self._ends[place])
        return _position(self._token_ids[entries], self._logprobs[entries], self._ranks[place], num_asked, tokenizer)


class PromptPositions(Sequence[Position | None]):
    """The log-probabilities of a prompt by position; None for the first, which nothing precedes.

    Each is made when it is read: a long prompt's take a hundred times the memory of the numbers.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._parts: list[PromptLogprobs] = []
        """Consecutive, from position 1 on."""
        self._length = 1

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Position | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[Position | None]: ...

    def __getitem__(self, index: int | slice) -> Position | list[Position | None] | None:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._length))]
        place = range(self._length)[index]
        if place == 0:
            return None
        part = self._parts[bisect_right(self._parts, place, key=lambda part: part.start) - 1]
        row = place - part.start
        token_ids, logprobs = part.token_ids[row].tolist(), part.logprobs[row].tolist()
        return _position(token_ids, logprobs, int(part.ranks[row]), 0, self._tokenizer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def append(self, part: PromptLogprobs) -> None:
        """Add the next positions. Those that are known already are not replaced."""
        num_known = self._length - part.start
        assert num_known >= 0, f"prompt logprobs from position {part.start} on, after {self._length} positions"
        if num_known < len(part.ranks):
            rest = PromptLogprobs(
                self._length, part.token_ids[num_known:], part.logprobs[num_known:], part.ranks[num_known:]
            )
            self._parts.append(rest)
            self._length += len(rest.ranks)


class PromptLogprobsBuilder:
    """The log-probabilities of one prompt, which come in parts while it is computed."""

    def __init__(self, num_prompt_tokens: int, tokenizer: Tokenizer | None) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self.positions = PromptPositions(tokenizer)

    @property
    def is_complete(self) -> bool:
        return len(self.positions) == self._num_prompt_tokens

    def add(self, part: PromptLogprobs) -> None:
        """Add the next positions. Those that are known already are not replaced."""
        self.positions.append(part)


def _position(
    token_ids: Sequence[int], logprobs: Sequence[float], rank: int, num_asked: int, tokenizer: Tokenizer | None
) -> Position:
    """Columns: the chosen token, the likeliest in order, those that were asked for. A token is listed once."""
    num_top = len(token_ids) - 1 - num_asked
    ranks = [rank, *range(1, num_top + 1), *[None] * num_asked]
    position: Position = {}
    for token_id, logprob, its_rank in zip(token_ids, logprobs, ranks, strict=True):
        if token_id not in position:
            text = None if tokenizer is None else tokenizer.token_to_text(token_id)
            position[token_id] = Logprob(logprob, its_rank, text)
    return position
