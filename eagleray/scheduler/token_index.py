"""Where n-grams of tokens occurred before, in the sequences of an engine.

A set-associative table of fixed size: an n-gram is hashed to a bucket of a few entries, each a place behind such an
n-gram, and a new entry overwrites one of them. So memory and time are bounded, whatever the number and length of the
sequences: an insertion writes one entry for each length of n-gram, and a lookup reads one bucket for each. An entry may
be out of date, or belong to another n-gram of the same bucket, so each is compared with the tokens of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NUM_BUCKETS = 2**18
ENTRIES_OF_BUCKET = 4
"""8 MiB of entries, of which only the pages that are written take memory."""

MAX_MATCH = 64
"""Longer matches are not told apart."""

_POSITION_BITS = 32


class Match(NamedTuple):
    """A place at which the last tokens of a sequence occurred before."""

    token_ids: Sequence[int]
    """The tokens of the sequence with that place."""
    end: int
    """Index of the token behind."""
    length: int
    """Number of tokens that are equal, at most `MAX_MATCH`."""


class TokenIndex:
    """Sequences by number, and the table. `lengths`: lengths of the n-grams that are indexed."""

    def __init__(self, lengths: Sequence[int], *, num_buckets: int = NUM_BUCKETS) -> None:
        self._lengths = sorted(lengths, reverse=True)
        self._mask = num_buckets - 1
        assert num_buckets & self._mask == 0, "the number of buckets is a power of two"
        # 0: no entry. A memoryview is read faster than an array of numpy, which takes memory only where it is written.
        self._entries = np.zeros(num_buckets * ENTRIES_OF_BUCKET, dtype=np.int64).data
        self._num_inserted = 0
        self._sequences: dict[int, tuple[Sequence[int], int]] = {}

    def add(self, number: int, token_ids: Sequence[int], domain: int) -> None:
        """Add a sequence, of which nothing is indexed yet. `number`: at least 1, and never used before. It may grow.
        `domain`: only sequences of the same domain find it."""
        self._sequences[number] = token_ids, domain

    def replace(self, number: int, token_ids: Sequence[int]) -> None:
        """Let other memory have the same tokens of a sequence."""
        self._sequences[number] = token_ids, self._sequences[number][1]

    def discard(self, number: int) -> None:
        """Remove a sequence, whose entries are overwritten later."""
        self._sequences.pop(number, None)

    def insert(self, number: int, end: int) -> None:
        """Index the n-grams of the sequence that end before `end`."""
        token_ids, domain = self._sequences[number]
        entry = number << _POSITION_BITS | end
        for length in self._lengths:
            if end >= length:
                self._num_inserted += 1
                bucket = self._bucket(token_ids, end, length, domain)
                self._entries[bucket + self._num_inserted % ENTRIES_OF_BUCKET] = entry

    def find(self, number: int) -> Match | None:
        """Return the best earlier occurrence of the last tokens of this sequence: the longest among those of the
        longest n-gram that is found, and of these the one that was indexed last."""
        token_ids, domain = self._sequences[number]
        end = len(token_ids)
        for length in self._lengths:
            if end < length:
                continue
            bucket = self._bucket(token_ids, end, length, domain)
            best: Match | None = None
            best_entry = 0
            for entry in self._entries[bucket : bucket + ENTRIES_OF_BUCKET]:
                other, place = entry >> _POSITION_BITS, entry & ((1 << _POSITION_BITS) - 1)
                found = self._sequences.get(other)
                if found is None or found[1] != domain or (other == number and place == end):
                    continue
                equal = _num_equal(token_ids, end, found[0], place)
                if equal >= length and (best is None or (equal, entry) > (best.length, best_entry)):
                    best, best_entry = Match(found[0], place, equal), entry
            if best is not None:
                return best
        return None

    def _bucket(self, token_ids: Sequence[int], end: int, length: int, domain: int) -> int:
        """Return the index of the first entry of the n-gram's bucket."""
        key = hash((domain, *token_ids[end - length : end]))
        return (key & self._mask) * ENTRIES_OF_BUCKET


def _num_equal(token_ids: Sequence[int], end: int, others: Sequence[int], place: int) -> int:
    """Return the number of tokens before `end` that equal those before `place`, at most `MAX_MATCH`."""
    most = min(MAX_MATCH, end, place)
    count = 0
    while count < most and token_ids[end - 1 - count] == others[place - 1 - count]:
        count += 1
    return count
