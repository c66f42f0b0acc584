"""What the actors of the compiled graph's tests do. Found by PYTHONPATH."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

__all__ = ["Edge", "make", "make_none"]


class Edge:
    """Answers a header and an array; to some headers, otherwise."""

    def handle(self, frames: list[Any]) -> list[Any]:
        match frames[0]:
            case b"sleep":
                time.sleep(60)
            case b"nothing":
                return []
        return [frames[0], np.full(1000, len(frames), dtype=np.float32).data.cast("B"), *frames[1:]]

    def close(self) -> None:
        pass


def make(payload: bytes) -> Edge:
    return Edge()


def make_none(payload: bytes) -> Edge:
    raise RuntimeError("it cannot be made")
