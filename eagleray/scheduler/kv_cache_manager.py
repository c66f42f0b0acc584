"""Which blocks of the KV cache a request's tokens live in. Driven by the scheduler, keeps its state in the pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eagleray.scheduler.blocks import BlockPool
from eagleray.scheduler.prefix import extend_hashes
from eagleray.scheduler.request import Request, Run


class KVCacheManager:
    """Block tables over one pool. Nothing is ever found in it when prefix caching is off."""

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
        """The longest chain of blocks that hold the request's first tokens and that it may read.

        A block without rows is of no use to a request that wants some of them. They are not held yet: a later call may
        evict them.
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
            if block is None or (index >= num_without and not self._pool.has_rows(block)):
                break
            found.append(block)
        return found

    def can_hold(self, num_tokens: int, *, cached: Sequence[int]) -> bool:
        """Whether `num_tokens` tokens, of which the first are in the blocks `cached`, would fit now."""
        num_new = self._num_blocks_of(num_tokens) - len(cached)
        return num_new + self._pool.num_free_among(cached) <= self._pool.num_free

    def start(self, num_tokens: int, *, cached: Sequence[int]) -> list[int]:
        """A block table for the first `num_tokens` tokens, which must fit."""
        self._pool.hold(cached)
        return [*cached, *self._pool.take(self._num_blocks_of(num_tokens) - len(cached))]

    def grow(self, run: Run, num_tokens: int) -> list[int] | None:
        """Lengthen the block table to hold the first `num_tokens` tokens: the added blocks; None if there are not
        enough."""
        num_new = max(0, self._num_blocks_of(num_tokens) - len(run.block_ids))
        if num_new > self._pool.num_free:
            return None
        added = self._pool.take(num_new)
        run.block_ids += added
        return added

    def commit(self, run: Run) -> None:
        """Let others find the blocks whose tokens are all known and computed (or planned to be: a step writes the
        cache before it reads it, so requests of the same step may share them)."""
        if not self.enable_prefix_caching:
            return
        num_full = min(run.num_computed_tokens, len(run.request.token_ids)) // self.block_size
        if num_full == run.num_committed_blocks:
            return
        self._extend_hashes(run.request)
        has_rows = run.request.routed_experts_from is not None
        for index in range(run.num_committed_blocks, num_full):
            self._pool.register(run.block_ids[index], run.request.block_hashes[index], has_rows=has_rows)
        run.num_committed_blocks = num_full

    def revoke(self, run: Run) -> None:
        """Nobody shall find the blocks of tokens that are, after all, not computed."""
        num_full = run.num_computed_tokens // self.block_size
        if num_full < run.num_committed_blocks:
            self._pool.forget(run.block_ids[num_full : run.num_committed_blocks])
            run.num_committed_blocks = num_full

    def release(self, block_ids: Sequence[int]) -> None:
        """A block table is given up. What others may find in it stays until the blocks are needed."""
        self._pool.release(block_ids)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Nobody shall find these blocks any more."""
        self._pool.forget(block_ids)

    def _num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _extend_hashes(self, request: Request) -> None:
        extend_hashes(request.block_hashes, request.token_ids, block_size=self.block_size, root=request.root_hash)
