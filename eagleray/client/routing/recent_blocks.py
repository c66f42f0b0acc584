"""What an engine's prefix cache probably holds: the blocks of the prompts that this client has sent it of late. Pure.

A guess that costs no message. Blocks are named by hashes that stand for their tokens and everything before them. When
the engine finds fewer of them than were expected, it has thrown them away, and with them whatever is older.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


def block_hashes(token_ids: Sequence[int], *, block_size: int, cache_salt: str) -> list[int]:
    """The names of the blocks of a prompt that a cache can have: full ones, and not the last token, which is always
    computed. They mean something in this process only, unlike those of the engine."""
    hashes: list[int] = []
    parent = hash(cache_salt)
    for end in range(block_size, len(token_ids), block_size):
        parent = hash((parent, *token_ids[end - block_size : end]))
        hashes.append(parent)
    return hashes


class PrefixMatch(NamedTuple):
    """A prompt that was sent to the engine."""

    number: int
    expected: list[int]
    """For each of its first blocks that the engine should have: the number of the use before this one."""


class RecentBlocks:
    """The blocks of one engine; at most `capacity` of them, the least recently used are forgotten first.

    Of a prompt, the later blocks count as the older ones. So a block is never forgotten before one that follows it, and
    those of a prompt that are known are always its first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, int] = OrderedDict()
        """Name -> number of its last use, oldest first."""
        self._num_uses = 0
        self._unconfirmed: set[int] = set()
        """Uses whose blocks may not be computed yet."""

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[int]) -> int:
        """How many of the first blocks of a prompt the engine should have."""
        return bisect_left(hashes, True, key=lambda name: name not in self._blocks)

    def use(self, hashes: Sequence[int]) -> PrefixMatch:
        """A prompt with these blocks is sent to the engine."""
        expected = []
        for name in hashes:
            last = self._blocks.get(name)
            if last is None or last in self._unconfirmed:
                break
            expected.append(last)
        self._num_uses += 1
        self._unconfirmed.add(self._num_uses)
        for name in reversed(hashes):
            self._blocks[name] = self._num_uses
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return PrefixMatch(self._num_uses, expected)

    def confirm(self, use: PrefixMatch, num_found: int) -> None:
        """The engine has found this many of the blocks in its cache, and has them all by now."""
        self._unconfirmed.discard(use.number)
        if num_found < len(use.expected):
            self._forget(use.expected[num_found])

    def drop(self, use: PrefixMatch) -> None:
        """The request has ended, and nobody knows what was found."""
        self._unconfirmed.discard(use.number)

    def _forget(self, last: int) -> None:
        """Everything that was used then or before."""
        while self._blocks:
            name, number = self._blocks.popitem(last=False)
            if number > last:
                self._blocks[name] = number
                self._blocks.move_to_end(name, last=False)
                return
