"""The tokens of a batch that each tensor-parallel rank holds under sequence parallelism. Pure."""

from __future__ import annotations

from eagleray.parallel.group import TensorParallelGroup


def token_shard(num_tokens: int, tp: TensorParallelGroup) -> range:
    """Return this rank's tokens of a batch. All ranks have equally many, except that the last ones may have fewer or
    none."""
    size = -(-num_tokens // tp.size)
    start = min(tp.rank * size, num_tokens)
    return range(start, min(start + size, num_tokens))


def token_counts(num_tokens: int, num_ranks: int) -> list[int]:
    """Return the number of tokens that each rank has of a batch, see `token_shard`."""
    size = -(-num_tokens // num_ranks)
    return [max(0, min(size, num_tokens - rank * size)) for rank in range(num_ranks)]
