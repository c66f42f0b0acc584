"""A worker extension that loads weights from a file of numpy. The workers import this module."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch


class NpzLoader:
    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def where(self) -> dict[str, Any]:
        return {"rank": self._worker.rank, "device": str(self._worker.device), "process": os.getpid()}

    def load_npz(self, path: str) -> list[str]:
        """Load whole weights by their names in the checkpoint; each rank keeps its part. Returns the names."""
        with np.load(path) as arrays:
            weights = [(name, torch.from_numpy(arrays[name])) for name in arrays.files]
        return sorted(self._worker.model.load_weights(weights))
