"""The device that a worker computes on."""

from __future__ import annotations

import os

import torch

from eagleray.errors import ConfigError

__all__ = ["choose_device", "set_threads"]


def choose_device(wanted: str) -> torch.device:
    """`auto`, `cpu` or `cuda` to a device. Raises `ConfigError` if it is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("option `device`: cuda was asked for, but torch sees no CUDA device here; use cpu or auto")
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def set_threads(num_threads: int | None) -> int:
    """Let torch use this many threads; by default as many as the cores this process may run on."""
    count = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count
