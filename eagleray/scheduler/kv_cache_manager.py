"""Assignment of KV cache blocks to requests. Driven by the scheduler; all state is in the block pool."""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.scheduler.blocks import BlockPool, extend_hashes
from eagleray.scheduler.request import Request, Run


class KVCacheManager:
    """Block tables over one pool. Without prefix caching, `lookup` never finds a block."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def lookup(self, request: Request) -> list[int]:
        """Return the longest chain of cached blocks that hold the request's first tokens and that it may read.

        A block without routed experts cannot serve a request that wants them for its tokens. The blocks are not
        retained yet: a later call may evict them.
        """
        if not self.enable_prefix_caching:
            return []
        self._extend_hashes(request)
        found: list[int] = []
        num_full = request.num_readable_tokens // self.block_size
        wanted_from = request.routed_experts_from
        num_without = num_full if wanted_from is None else wanted_from // self.block_size
        for index in range(num_full):
            block = self._pool.find(request.block_hashes[index])
            if block is None or (index >= num_without and not self._pool.has_routed_experts(block)):
                break
            found.append(block)
        return found

    def can_hold(self, num_tokens: int, *, cached: Sequence[int]) -> bool:
        """Whether `num_tokens` tokens, the first of which are in the blocks `cached`, would fit now."""
        num_new = self._num_blocks_of(num_tokens) - len(cached)
        return num_new + self._pool.num_free_among(cached) <= self._pool.num_free

    def allocate(self, num_tokens: int, *, cached: Sequence[int]) -> list[int]:
        """Return a block table for the first `num_tokens` tokens, which must fit."""
        self._pool.retain(cached)
        return [*cached, *self._pool.allocate(self._num_blocks_of(num_tokens) - len(cached))]

    def extend(self, run: Run, num_tokens: int) -> list[int] | None:
        """Extend the block table to hold the first `num_tokens` tokens and return the added blocks, or None if too few
        are free."""
        num_new = self._num_blocks_of(num_tokens) - len(run.block_ids)
        if num_new <= 0:
            return []
        if num_new > self._pool.num_free:
            return None
        added = self._pool.allocate(num_new)
        run.block_ids += added
        return added

    def add_block(self, run: Run) -> list[int] | None:
        """Add a block to the table of a run, and return it in a list, or None if none is free."""
        if not self._pool.num_free:
            return None
        added = [self._pool.allocate_one()]
        run.block_ids += added
        return added

    def commit(self, run: Run) -> None:
        """Register the blocks whose tokens are all known and computed, or planned to be: a step writes the cache before
        it reads it, so requests of the same step may share them."""
        if not (self.enable_prefix_caching and run.is_cacheable):
            return
        request, num_committed = run.request, run.num_committed_blocks
        num_full = min(run.num_computed_tokens, len(request.token_ids)) // self.block_size
        if num_full == num_committed:
            return
        self._extend_hashes(request)
        has_routed_experts = request.routed_experts_from is not None
        for index in range(num_committed, num_full):
            block, prefix_hash = run.block_ids[index], request.block_hashes[index]
            self._pool.register(block, prefix_hash, has_routed_experts=has_routed_experts)
        run.num_committed_blocks = num_full

    def num_slots(self, run: Run) -> int:
        """Return the number of tokens for which the run has blocks."""
        return len(run.block_ids) * self.block_size

    def uncommit(self, run: Run) -> None:
        """Remove the blocks of tokens that were planned but never computed from the prefix cache."""
        num_full = run.num_computed_tokens // self.block_size
        if num_full < run.num_committed_blocks:
            self._pool.invalidate(run.block_ids[num_full : run.num_committed_blocks])
            run.num_committed_blocks = num_full

    def release(self, block_ids: Sequence[int]) -> None:
        """Release a block table. Its cached blocks can be found until they are allocated again."""
        self._pool.release(block_ids)

    def invalidate(self, run: Run) -> None:
        """Remove the blocks of a run from the prefix cache, for good."""
        run.is_cacheable = False
        self._pool.invalidate(run.block_ids)

    def clear(self) -> bool:
        """Empty the prefix cache. Returns False, and changes nothing, if a block is in use."""
        return self._pool.clear()

    def _num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _extend_hashes(self, request: Request) -> None:
        extend_hashes(request.block_hashes, request.token_ids, block_size=self.block_size, root=request.root_hash)
