"""Log-probabilities of many positions in a few flat lists, for requests with `flat_logprobs`.

The lists hold numbers and texts instead of an object for each entry, so Python's garbage collector has little to visit.
Attributes have the names of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from eagleray.client.outputs import Logprob


@dataclass(slots=True)
class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """A sequence with a dict by token id for each position, which is made when it is read.

    A position without log-probabilities, such as the first of a prompt, is an empty dict.
    """

    start_indices: list[int] = field(default_factory=list)
    """Index of the first entry of each position in the lists of entries."""
    end_indices: list[int] = field(default_factory=list)
    """Index after the last entry of each position."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, positions: Iterable[dict[int, Logprob] | None]) -> FlatLogprobs:
        """Return a flat copy of these positions."""
        flat = cls()
        for position in positions:
            flat.append(position)
        return flat

    def append(self, position: dict[int, Logprob] | None) -> None:
        """Append a position; None has no entries."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[dict[int, Logprob] | None]) -> None:
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        if isinstance(index, slice):
            return FlatLogprobs.of(self[position] for position in range(*index.indices(len(self))))
        entries = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[entry]: Logprob(self.logprobs[entry], self.ranks[entry], self.decoded_tokens[entry])
            for entry in entries
        }
