"""Where n-grams of tokens occurred before, in the sequences of an engine.

A set-associative table of fixed size: an n-gram is hashed to a bucket of a few entries, each a place behind such an
n-gram: the newest comes first, and the one that was first overwrites another. So memory and time are bounded, whatever
the number and length of the sequences: a token writes one entry for each length of n-gram, and a lookup reads one
bucket for each. An entry may be out of date, or belong to another n-gram of the same bucket, so each is compared with
the tokens of its sequence.

Hashes roll: that of an n-gram is made of the hash before it and its last token. They are polynomials modulo 2**64 whose
base is a multiple of a power of two, chosen so that tokens before the n-gram are multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

NUM_BUCKETS = 2**17
_ENTRY_BITS = 3
ENTRIES_OF_BUCKET = 1 << _ENTRY_BITS
"""8 MiB of entries."""

LEAST_AT_ONCE = 24
"""Number of tokens from which numpy is faster than a loop."""

_POSITION_BITS = 32
_POSITION = (1 << _POSITION_BITS) - 1
_WORD = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
_PRIME = 0xC2B2AE3D27D4EB4F


class Place(NamedTuple):
    """A place in a sequence, before its token at `position`."""

    token_ids: Sequence[int]
    position: int


@dataclass(slots=True, eq=False)
class IndexedSequence:
    """Tokens that may grow, and how far they are indexed."""

    number: int
    domain: int
    token_ids: Sequence[int]
    keys: list[int]
    """Hash of the last n-gram of each length among the indexed tokens."""
    first_place: int = 0
    """Index of the first token that is found."""
    num_indexed: int = 0


class TokenIndex:
    """The table, and the sequences by number. `lengths`: lengths of the n-grams that are indexed."""

    def __init__(self, lengths: Sequence[int], *, max_match: int, num_buckets: int = NUM_BUCKETS) -> None:
        """`max_match`: longer matches are not told apart."""
        self._lengths = sorted(set(lengths), reverse=True)
        self._bases = [_base(length) for length in self._lengths]
        self._salts = [pow(_PRIME, 1 + length, 1 << 64) for length in self._lengths]
        """Numbers that are added to hashes, so that each length of n-gram has other buckets."""
        self._max_match = max_match
        self._shift = 65 - num_buckets.bit_length()
        assert num_buckets & (num_buckets - 1) == 0, "the number of buckets is a power of two"
        # 0: no entry. All pages are written now, because a step would wait for each. A memoryview is read faster.
        self._array = np.full(num_buckets * ENTRIES_OF_BUCKET, 0, dtype=np.int64)
        self._entries = self._array.data
        self._sequences: dict[int, IndexedSequence] = {}
        self._num_added = 0
        self._num_inserted = 0

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._sequences)

    def add(self, token_ids: Sequence[int], *, domain: int, first_place: int = 0) -> IndexedSequence:
        """Add a sequence, of which nothing is indexed yet. `domain`: a lookup finds the sequences of one domain.
        `first_place`: index of the first token that is found; those before are what it is found by."""
        self._num_added += 1
        sequence = IndexedSequence(self._num_added, domain, token_ids, [0] * len(self._lengths), first_place)
        self._sequences[sequence.number] = sequence
        return sequence

    def discard(self, sequence: IndexedSequence) -> None:
        """Remove a sequence, whose entries are overwritten later."""
        self._sequences.pop(sequence.number, None)

    def insert(self, sequence: IndexedSequence, limit: int) -> None:
        """Index up to `limit` further tokens of a sequence."""
        first = sequence.num_indexed
        end = min(len(sequence.token_ids), first + limit)
        if end - first >= LEAST_AT_ONCE:
            self._insert_many(sequence, end)
            return
        entries, keys, domain = self._entries, sequence.keys, sequence.domain * _PRIME
        for place in range(first + 1, end + 1):
            token_id, entry = sequence.token_ids[place - 1], sequence.number << _POSITION_BITS | place
            self._num_inserted += 1
            way = 1 + self._num_inserted % (ENTRIES_OF_BUCKET - 1)
            for number, base in enumerate(self._bases):
                keys[number] = key = (keys[number] * base + token_id) & _WORD
                if place >= self._lengths[number] and place >= sequence.first_place:
                    bucket = ((key + domain + self._salts[number]) * _ODD & _WORD) >> self._shift << _ENTRY_BITS
                    if before := entries[bucket]:
                        entries[bucket + way] = before
                    entries[bucket] = entry
        sequence.num_indexed = end

    def find(self, sequence: IndexedSequence, token_ids: Sequence[int], domain: int) -> tuple[list[Place], int]:
        """Return places in the sequences of a domain at which the last of these tokens occurred before, the newest
        first, and the number of equal tokens. They are the longest among those of the longest n-gram that is found.
        `sequence` is indexed up to the last of these tokens."""
        end = len(token_ids)
        for length, salt, key in zip(self._lengths, self._salts, sequence.keys, strict=True):
            if end < length:
                continue
            bucket = ((key + domain * _PRIME + salt) * _ODD & _WORD) >> self._shift << _ENTRY_BITS
            if not self._entries[bucket]:
                continue
            best = length
            found: list[tuple[int, Place]] = []
            for entry in self._entries[bucket : bucket + ENTRIES_OF_BUCKET]:
                if not entry or (other := self._sequences.get(entry >> _POSITION_BITS)) is None:
                    continue
                others, place = other.token_ids, entry & _POSITION
                if other.domain != domain or place >= len(others):
                    continue
                equal = _num_equal(token_ids, others, place, self._max_match)
                if equal > best:
                    best = equal
                    found.clear()
                if equal == best:
                    found.append((entry, Place(others, place)))
            if found:
                found.sort(key=_entry_of, reverse=True)
                return [place for _, place in found], best
        return [], 0

    def _insert_many(self, sequence: IndexedSequence, end: int) -> None:
        """Index the tokens of a sequence before `end`."""
        first = sequence.num_indexed
        start = max(0, first + 1 - self._lengths[0])
        known = np.array(sequence.token_ids[start:end], dtype=np.uint64)
        places = np.arange(first + 1, end + 1)
        ways = 1 + (self._num_inserted + places) % (ENTRIES_OF_BUCKET - 1)
        entries = sequence.number << _POSITION_BITS | places
        for number, (length, base) in enumerate(zip(self._lengths, self._bases, strict=True)):
            keys = np.zeros(end - start, dtype=np.uint64)
            for back in range(min(length, end - start)):
                factor = np.uint64(pow(base, back, 1 << 64))
                keys[back:] += known[: end - start - back] * factor
            sequence.keys[number] = int(keys[-1])
            salt = np.uint64((sequence.domain * _PRIME + self._salts[number]) & _WORD)
            keys = (keys[first - start :] + salt) * np.uint64(_ODD)
            buckets = (keys >> np.uint64(self._shift)).astype(np.int64) << _ENTRY_BITS
            is_found = places >= max(length, sequence.first_place)
            self._put(buckets[is_found], entries[is_found], ways[is_found])
        self._num_inserted += len(places)
        sequence.num_indexed = end

    def _put(self, buckets: IntArray, entries: IntArray, ways: IntArray) -> None:
        """Put each entry first in its bucket. Those that were there before get other entries, where there are any."""
        before = self._array[buckets]
        is_used = before != 0
        self._array[(buckets + ways)[is_used]] = before[is_used]
        self._array[buckets] = entries
        is_followed = self._array[buckets] != entries  # by a later one for the same bucket
        self._array[(buckets + ways)[is_followed]] = entries[is_followed]


def _base(length: int) -> int:
    """Return a base whose power `length` is 0 modulo 2**64."""
    return (_ODD << -(-64 // length)) & _WORD


def _entry_of(found: tuple[int, Place]) -> int:
    return found[0]


def _num_equal(token_ids: Sequence[int], others: Sequence[int], place: int, most: int) -> int:
    """Return the number of last tokens that equal those before `place`, at most `most`."""
    end = len(token_ids)
    most = min(most, end, place)
    count = 0
    while count < most and token_ids[end - 1 - count] == others[place - 1 - count]:
        count += 1
    return count
