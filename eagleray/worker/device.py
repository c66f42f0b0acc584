"""The device that a worker computes on."""

from __future__ import annotations

import torch

from eagleray.errors import ConfigError


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
