"""The device that a worker computes on."""

from __future__ import annotations

import os

import torch

from eagleray.errors import ConfigError

__all__ = ["choose_device", "set_threads"]


def choose_device(wanted: str, index: int | None = None) -> torch.device:
    """`auto`, `cpu` or `cuda` to a device; `index`: which of the GPUs. Raises `ConfigError` if it is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("option `device`: cuda was asked for, but torch sees no CUDA device here; use cpu or auto")
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        count = torch.cuda.device_count()
        if index is not None and index >= count:
            raise ConfigError(
                f"worker {index} of this node wants a GPU of its own, but torch sees {count}: lower "
                "tensor_parallel_size x pipeline_parallel_size"
            )
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def set_threads(num_threads: int | None, *, num_workers: int) -> int:
    """Let torch use this many threads; by default a worker's share of the cores that this process may run on.

    `num_workers`: how many workers use them.
    """
    count = num_threads or max(1, len(os.sched_getaffinity(0)) // num_workers)
    torch.set_num_threads(count)
    return count
