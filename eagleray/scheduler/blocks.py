"""The pool of cache blocks: who holds each one, and which hold a known prefix.

Owns reference counts, the free blocks and the map from a prefix's hash to its block. Driven by `kv_cache`.

A known block may have rows: it is stored (see `routed_experts`), or will be by a step in flight, which experts computed
its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0 to `num_blocks - 1`.

    A block is held (reference count above 0) or free. A free block whose content is known keeps it until it is taken
    for something else: those without known content go first, then the least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._has_rows = [False] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._reusable)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        return sum(self._num_holders[block] == 0 for block in block_ids)

    def take(self, count: int) -> list[int]:
        """Free blocks for new content, each with one holder. The caller knows that there are enough."""
        assert count <= self.num_free
        return [self._take_one() for _ in range(count)]

    def hold(self, block_ids: Iterable[int]) -> None:
        """One more holder for each of these blocks, whose content is known."""
        for block in block_ids:
            if self._num_holders[block] == 0:
                del self._reusable[block]
            self._num_holders[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One holder less for each block of a sequence; its tail will be evicted before its head."""
        for block in reversed(block_ids):
            assert self._num_holders[block] > 0, f"block {block} is released, but nobody holds it"
            self._num_holders[block] -= 1
            if self._num_holders[block] > 0:
                continue
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._reusable[block] = None

    def find(self, prefix_hash: bytes) -> int | None:
        """The block that holds this prefix's last tokens."""
        return self._by_hash.get(prefix_hash)

    def has_rows(self, block: int) -> bool:
        return self._has_rows[block]

    def register(self, block: int, prefix_hash: bytes, *, has_rows: bool = False) -> None:
        """The content of a held block is known now. If another block has the same, that one stays the known one, unless
        only this one has rows."""
        assert self._num_holders[block] > 0 and self._hashes[block] is None
        known = self._by_hash.get(prefix_hash)
        if known is not None:
            if self._has_rows[known] or not has_rows:
                return
            self._make_unknown(known)
        self._by_hash[prefix_hash] = block
        self._hashes[block] = prefix_hash
        self._has_rows[block] = has_rows

    def forget(self, block_ids: Iterable[int]) -> None:
        """The content of these held blocks is not to be trusted: nobody shall find it from here on."""
        for block in block_ids:
            assert self._num_holders[block] > 0
            self._drop_hash(block)

    def _take_one(self) -> int:
        block = self._blank.pop() if self._blank else self._reusable.popitem(last=False)[0]
        self._drop_hash(block)
        self._num_holders[block] = 1
        return block

    def _make_unknown(self, block: int) -> None:
        self._drop_hash(block)
        if self._num_holders[block] == 0:
            del self._reusable[block]
            self._blank.append(block)

    def _drop_hash(self, block: int) -> None:
        prefix_hash = self._hashes[block]
        if prefix_hash is not None:
            del self._by_hash[prefix_hash]
            self._hashes[block] = None
            self._has_rows[block] = False
