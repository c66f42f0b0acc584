"""The blocks that an engine's prefix cache probably holds, guessed from the prompts that this client sent there. Pure.

The guess costs no message. Blocks are named by hashes of their tokens and everything before them. When the engine finds
fewer of them than expected, it has evicted them, and with them everything older.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


def block_hashes(
    token_ids: Sequence[int], *, block_size: int, cache_salt: str, update: int = 0, adapter: int = 0
) -> list[int]:
    """Return the names of the blocks of a prompt that a cache can hold. `update`: number of the weight update whose
    weights computed them; `adapter`: number of the adapter's load, 0 for none.

    These are the full blocks without the last token, which is always computed. Names are valid in this process only,
    unlike the engine's.
    """
    hashes: list[int] = []
    parent = hash((cache_salt, update, adapter))
    for end in range(block_size, len(token_ids), block_size):
        parent = hash((parent, *token_ids[end - block_size : end]))
        hashes.append(parent)
    return hashes


class PrefixMatch(NamedTuple):
    """A prompt that was sent to an engine, and the blocks that the engine should have had before."""

    number: int
    expected: list[int]
    """Number of the last earlier use of each of the first blocks, as far as the engine should have them."""


class RecentBlocks:
    """The blocks of one engine, at most `capacity`; the least recently used are forgotten first.

    Among the blocks of one prompt, later blocks count as older. So a block is never forgotten before one that follows
    it, and the known blocks of a prompt are always its first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, int] = OrderedDict()
        """Name → number of the last use, oldest first."""
        self._num_uses = 0
        self._unconfirmed: set[int] = set()
        """Uses whose blocks may not be computed yet."""

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many of the first blocks of a prompt the engine should have."""
        return bisect_left(hashes, True, key=lambda name: name not in self._blocks)

    def use(self, hashes: Sequence[int]) -> PrefixMatch:
        """Record that a prompt with these blocks is sent to the engine."""
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
        """Record that the engine found `num_found` of the blocks in its cache, and now has all of them."""
        self._unconfirmed.discard(use.number)
        if num_found < len(use.expected):
            self._forget(use.expected[num_found])

    def drop(self, use: PrefixMatch) -> None:
        """Record that the request has finished without a report of how many blocks were found."""
        self._unconfirmed.discard(use.number)

    def _forget(self, last: int) -> None:
        """Forget every block whose last use was `last` or earlier."""
        while self._blocks:
            name, number = self._blocks.popitem(last=False)
            if number > last:
                self._blocks[name] = number
                self._blocks.move_to_end(name, last=False)
                return
