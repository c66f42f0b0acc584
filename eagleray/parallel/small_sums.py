"""Sums of small tensors over the GPUs of one node, which read each other's memory.

NCCL takes several times as long for a small sum, of which a step has two in each layer. Whether GPUs can map each
other's memory is known only after it was tried, on all ranks, so the ranks agree after each step of the attempt.

Opened by the tensor-parallel group, which uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from eagleray.log import get_logger

logger = get_logger(__name__)

MAX_SUM_BYTES = 256 * 1024
"""Largest tensor that is added up in this way. Every rank reads the tensors of all others, so NCCL is faster beyond."""

ALIGNMENT = 16
"""Bytes that a rank reads at once. Tensors of other sizes go to NCCL."""

SYMMETRIC_SIZES = (2, 4, 8)
"""Numbers of ranks for which the parts are added up in order of the ranks, with the same bits on all of them."""

SYMMETRIC_DTYPES = (torch.float32, torch.bfloat16)


class SmallSum(Protocol):
    """The sum over the ranks, computed in place, which a CUDA graph can capture."""

    def serves(self, x: Tensor) -> bool:
        """Whether `add_up` can be called: the same on all ranks for tensors of the same shape and dtype."""
        ...

    def add_up(self, x: Tensor) -> None:
        """Replace `x` by the sum over all ranks."""
        ...


class SymmetricSum(SmallSum):
    """Sums by torch's symmetric memory. All ranks make one at the same time, under the same `name`."""

    def __init__(self, name: str, *, rank: int, size: int, device: torch.device, store: Store) -> None:
        # imported here because it takes long, and workers on CPUs do without
        from torch._C._distributed_c10d import _SymmetricMemory

        _SymmetricMemory.set_group_info(name, rank, size, store)
        memory: Tensor = _SymmetricMemory.empty_strided_p2p((MAX_SUM_BYTES,), (1,), torch.uint8, device)
        self._connected = _SymmetricMemory.rendezvous(memory, name)
        self._parts = {dtype: memory.view(dtype) for dtype in SYMMETRIC_DTYPES}
        self._name = name
        self._add_up: Callable[..., Any] = torch.ops.symm_mem.one_shot_all_reduce_copy_out

    @staticmethod
    def is_possible(size: int, device: torch.device) -> bool:
        """Whether the GPUs of `size` ranks of this node may be able to map each other's memory."""
        num_visible = torch.cuda.device_count()
        return (
            size in SYMMETRIC_SIZES
            and size <= num_visible
            and all(
                torch.cuda.can_device_access_peer(device, other)
                for other in range(num_visible)
                if other != device.index
            )
        )

    def serves(self, x: Tensor) -> bool:
        is_aligned = x.nbytes % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0
        return x.dtype in SYMMETRIC_DTYPES and 0 < x.nbytes <= MAX_SUM_BYTES and x.is_contiguous() and is_aligned

    def add_up(self, x: Tensor) -> None:
        flat = x.view(-1)
        # A rank returns when all have read its part, so the next sum may overwrite it.
        self._add_up(self._parts[x.dtype][: len(flat)], flat, "sum", self._name, flat)


def open_small_sum(
    make: Callable[[], SmallSum],
    *,
    is_possible: bool,
    rank: int,
    size: int,
    device: torch.device,
    agree: Callable[[bool], bool],
) -> SmallSum | None:
    """Return `make()` if it works on all ranks, and None on all of them otherwise. All ranks call this together.

    `agree(x)` returns whether x is true on all ranks; `is_possible`: whether this rank should try.
    """
    if not agree(is_possible):
        logger.info("sums over the ranks go by NCCL: these GPUs cannot all read each other's memory")
        return None
    made: SmallSum | None = None
    is_right, cause = False, "another rank has failed"
    try:
        made = make()
    except Exception as error:  # torch raises errors of many kinds here, and NCCL serves whatever the cause is
        cause = f"{type(error).__name__}: {error}"
    if agree(made is not None):
        assert made is not None
        try:
            is_right = _adds_up(made, rank, size, device)
            cause = cause if is_right else "a sum was wrong"
        except RuntimeError as error:
            cause = str(error)
        if agree(is_right):
            return made
    logger.warning("sums over the ranks go by NCCL, which takes longer for small ones: %s", cause)
    return None


def _adds_up(small_sum: SmallSum, rank: int, size: int, device: torch.device) -> bool:
    """Whether a sum is right for each dtype. Every rank of the group computes both."""
    results = []
    for dtype in SYMMETRIC_DTYPES:
        x = torch.full((1024,), rank + 1, dtype=dtype, device=device)
        small_sum.add_up(x)
        results.append(x)
    return all(bool((x == size * (size + 1) // 2).all()) for x in results)
