"""The trainer's side of backend `shm`: weights in a segment of shared memory that workers of the same node read.

with SharedMemorySender() as sender:
    update_info = sender.write(model.state_dict().items())
    # POST /start_weight_update, /update_weights {"update_info": update_info}, /finish_weight_update
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from eagleray.weights.tensors import aligned, as_bytes, describe, to_update_info

SHARED_MEMORY_DIR = Path("/dev/shm")


def node_id() -> str:
    """Return an id that processes have in common if they can share memory: that of this boot of the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class SharedMemorySender:
    """Owns one POSIX segment, which grows to the largest update. A context manager that removes it."""

    def __init__(self) -> None:
        self._name = f"eagleray-weights-{os.getpid()}-{secrets.token_hex(4)}"
        self._path = SHARED_MEMORY_DIR / self._name
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> SharedMemorySender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Copy the tensors into the segment, and return the fields for `update_weights`. The previous update must have
        been received: its tensors are overwritten."""
        weights = list(weights)
        offsets, size = [], 0
        for _, tensor in weights:
            offsets.append(size)
            size += aligned(tensor.nbytes)
        self._grow(max(size, 1))
        for offset, (_, tensor) in zip(offsets, weights, strict=True):
            self._buffer[offset : offset + tensor.nbytes].copy_(as_bytes(tensor))
        return {
            "backend": "shm",
            **to_update_info(describe(weights)),
            "offsets": offsets,
            "name": self._name,
            "size": size,
            "node": node_id(),
        }

    def close(self) -> None:
        """Remove the segment. Idempotent."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _grow(self, size: int) -> None:
        if size <= len(self._buffer):
            return
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # without room this is an error now, not a SIGBUS later
            self._buffer = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        finally:
            os.close(file)
