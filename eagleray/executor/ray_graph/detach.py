"""Copies of the results of a compiled graph, so that nothing refers to the memory of its channels afterwards.

Ray returns arrays that alias the shared memory of the channel, and the channel cannot be written again while anything
refers to them: results that are kept stall the graph, after the number of steps that it buffers. A borrowed array
cannot be recognized by a read-only flag (an owned array may be read-only, and the flag of a borrowed one may be
changed), but by the end of its chain of bases: memory that Python or numpy allocated, or other memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def detach(value: Any) -> Any:
    """Return `value` with every borrowed array, memoryview or tensor in it replaced by a copy, at any depth of lists,
    tuples and dicts. Owned objects are passed on unchanged."""
    match value:
        case np.ndarray():
            return value.copy() if is_borrowed(value) else value
        case memoryview():
            return memoryview(bytes(value)) if is_borrowed(value) else value
        case list():
            return [detach(item) for item in value]
        case tuple():
            items = [detach(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        case dict():
            return {key: detach(item) for key, item in value.items()}
    # A tensor does not tell what owns its memory. Recognized by its module, because engines do not import torch.
    if type(value).__module__ == "torch" and hasattr(value, "untyped_storage"):
        return value.clone()
    return value


def is_borrowed(view: np.ndarray[Any, Any] | memoryview) -> bool:
    """Whether the memory behind `view` was allocated by neither numpy nor Python."""
    base: Any = view
    while True:
        if isinstance(base, np.ndarray):
            if base.base is None:
                return not base.flags.owndata
            base = base.base
        elif isinstance(base, memoryview):
            base = base.obj
        else:
            return not isinstance(base, (bytes, bytearray))
