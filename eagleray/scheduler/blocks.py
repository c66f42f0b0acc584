"""The pool of cache blocks: reference counts, free blocks, and the map from a block's hash to the block.

Driven by `kv_cache_manager`. A block's hash stands for its tokens and for all tokens before them, on every machine. A
block is cached if its hash is registered, so that other requests find it. A cached block has routed experts if the
experts that computed its tokens are stored (see `routed_experts`), or will be by a step in flight.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from hashlib import blake2b

# 128 bits: two different prefixes with one hash are not to be expected before 2**64 blocks.
HASH_BYTES = 16

_BLOCK_HASHER = blake2b(digest_size=HASH_BYTES, person=b"eagleray block")


class BlockPool:
    """Blocks 0 to `num_blocks - 1`.

    A block is referenced (reference count above 0) or free. A free block that is cached keeps its content until it is
    allocated again: blocks that are not cached are allocated first, then the least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._with_routed_experts = [False] * num_blocks
        self._free_uncached = list(range(num_blocks - 1, -1, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free_uncached) + len(self._free_cached)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        return sum(self._ref_counts[block] == 0 for block in block_ids)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks for new content, each with one reference. The caller knows that there are enough."""
        assert count <= self.num_free
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        """Allocate a block with one reference. The caller knows that there is one."""
        if self._free_uncached:
            block = self._free_uncached.pop()
        else:
            block, _ = self._free_cached.popitem(last=False)
            self._drop_hash(block)
        self._ref_counts[block] = 1
        return block

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these cached blocks."""
        for block in block_ids:
            if self._ref_counts[block] == 0:
                del self._free_cached[block]
            self._ref_counts[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a sequence; its tail will be evicted before its head."""
        for block in reversed(block_ids):
            assert self._ref_counts[block] > 0, f"block {block} is released, but has no reference"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if self._hashes[block] is None:
                self._free_uncached.append(block)
            else:
                self._free_cached[block] = None

    def find(self, prefix_hash: bytes) -> int | None:
        """Return the cached block that holds this prefix's last tokens."""
        return self._by_hash.get(prefix_hash)

    def has_routed_experts(self, block: int) -> bool:
        return self._with_routed_experts[block]

    def register(self, block: int, prefix_hash: bytes, *, has_routed_experts: bool = False) -> None:
        """Cache a referenced block under its hash. If another block has the same hash, that one stays cached instead,
        unless only this one has routed experts."""
        assert self._ref_counts[block] > 0 and self._hashes[block] is None
        known = self._by_hash.get(prefix_hash)
        if known is not None:
            if self._with_routed_experts[known] or not has_routed_experts:
                return
            self._uncache(known)
        self._by_hash[prefix_hash] = block
        self._hashes[block] = prefix_hash
        self._with_routed_experts[block] = has_routed_experts

    def invalidate(self, block_ids: Iterable[int]) -> None:
        """Remove these referenced blocks, whose content may be wrong, from the prefix cache."""
        for block in block_ids:
            assert self._ref_counts[block] > 0
            self._drop_hash(block)

    def clear(self) -> bool:
        """Remove all blocks from the prefix cache. Returns False, and removes none, if one of them is referenced."""
        if self.num_free < self.num_blocks:
            return False
        for block in list(self._free_cached):
            self._uncache(block)
        return True

    def _uncache(self, block: int) -> None:
        self._drop_hash(block)
        if self._ref_counts[block] == 0:
            del self._free_cached[block]
            self._free_uncached.append(block)

    def _drop_hash(self, block: int) -> None:
        prefix_hash = self._hashes[block]
        if prefix_hash is not None:
            del self._by_hash[prefix_hash]
            self._hashes[block] = None
            self._with_routed_experts[block] = False


def root_hash(cache_salt: str, update: int = 0, num_loads: int = 0, *, adapter: int = 0) -> bytes:
    """Return the parent of a sequence's first block hash. Prefixes share a hash only if they have the same salt, and
    were computed with the weights of the same update, after the same number of other loads of weights (`num_loads`),
    and with the same adapter (`adapter`: number of its load, 0 without one)."""
    salt = update.to_bytes(8, "little") + num_loads.to_bytes(8, "little")
    key = adapter.to_bytes(8, "little") if adapter else b""
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES, key=key, salt=salt, person=b"eagleray salt").digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], *, block_size: int, root: bytes) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not have yet."""
    end = len(token_ids) - block_size
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, end + 1, block_size):
        hasher = _BLOCK_HASHER.copy()  # takes half as long as a new one
        hasher.update(parent + _packer(block_size)(*token_ids[start : start + block_size]))
        parent = hasher.digest()
        hashes.append(parent)


@cache
def _packer(num_tokens: int) -> Callable[..., bytes]:
    """Return the function that packs this number of token ids, which are little-endian on every machine."""
    return struct.Struct(f"<{num_tokens}I").pack
