"""The number of threads that compute some work fastest, and the alignment of their working memory."""

from __future__ import annotations

import torch
from torch import Tensor

SINGLE_THREAD_SECONDS = 150e-6
"""Work that takes one thread less than this is not worth waking another."""
BYTES_PER_SECOND = 60e9
"""Rough memory bandwidth of one thread."""
OPERATIONS_PER_SECOND = 400e9
"""Rough arithmetic rate of one thread."""
EXPERT_TOKENS = 512
"""Tokens that go through the experts together, so few that intermediate results stay in the processor's cache."""


def threads_for(num_weights: int, dtype: torch.dtype, num_rows: int, num_threads: int) -> int:
    """Return the number of threads, at most `num_threads`, that multiply `num_rows` with `num_weights` fastest."""
    seconds = num_weights * max(dtype.itemsize / BYTES_PER_SECOND, 2 * num_rows / OPERATIONS_PER_SECOND)
    return 1 if seconds < SINGLE_THREAD_SECONDS else num_threads


def aligned(memory: Tensor) -> int:
    """Return the first address in `memory` that is a multiple of 64."""
    return -(-memory.data_ptr() // 64) * 64
