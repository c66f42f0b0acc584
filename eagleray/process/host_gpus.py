"""The NVIDIA GPUs of this host, counted without torch."""

from __future__ import annotations

import os
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")


def num_visible_gpus() -> int:
    """Return the number of GPUs that processes started by this one see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    count = 0
    for name in visible.split(","):
        if not name.strip() or name.strip() == "-1":  # CUDA ignores what follows an invalid one
            break
        count += 1
    return count
