"""Arrays inside messages.

A small array travels inside its message; a large one as a frame of its own, so that it is never copied into the
encoder's buffer. What a decoder returns is owned by the receiver: the bytes behind it were allocated for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Frame = bytes | bytearray | memoryview

INLINE_BYTES = 4096
"""Size up to which an array is part of its message: a frame of its own costs more than the copy."""


def pack_array(array: Array, frames: list[Frame]) -> tuple[str, tuple[int, ...], bytes | int]:
    """Return (dtype, shape, data), where data is the bytes or the index in `frames` of the frame that holds them."""
    array = np.ascontiguousarray(array)
    if array.nbytes <= INLINE_BYTES:
        return array.dtype.str, array.shape, array.tobytes()
    frames.append(array.data.cast("B"))
    return array.dtype.str, array.shape, len(frames) - 1


def unpack_array(packed: Any, frames: list[Frame]) -> Array:
    """Inverse of `pack_array`."""
    dtype, shape, data = packed
    buffer = frames[data] if isinstance(data, int) else data
    return np.frombuffer(buffer, dtype=np.dtype(dtype)).reshape(shape)
