"""The experts that computed each token, in the forms that answers have. Pure."""

from __future__ import annotations

import io
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from eagleray.client.outputs import CompletionDelta, CompletionOutput

RoutedExpertsFormat = Annotated[
    Literal["npy", "raw"],
    Meta(description="npy (default): a .npy file, in base64. raw: an object of `data`, `shape`, `dtype` and `start`."),
]


class RawRoutedExperts(msgspec.Struct, frozen=True):
    """Experts of consecutive positions of prompt and completion."""

    data: Annotated[bytes, Meta(description="The elements in C order; base64 in JSON.")]
    shape: Annotated[list[int], Meta(description="[num_tokens, num_moe_layers, top_k]")]
    dtype: Annotated[str, Meta(description='numpy\'s name of it: "|u1" or "<u2".')]
    start: Annotated[int, Meta(description="Position of the first row.")]


COMPACT_DTYPES = (np.uint8, np.int16, np.int32)
"""Types of expert numbers. SkyRL's client accepts only the first one in which all numbers of the array fit."""

RoutedExpertsField = (
    Annotated[bytes, Meta(description="A .npy file of [num_tokens, num_moe_layers, top_k]; base64 in JSON.")]
    | RawRoutedExperts
    | UnsetType
    | None
)
"""Type of a choice's field. Bytes are base64 in JSON, and stay bytes in msgpack."""


def routed_experts(
    part: CompletionDelta | CompletionOutput, form: Literal["npy", "raw"] | None
) -> bytes | RawRoutedExperts | UnsetType:
    """Return the routed experts of a whole completion or of a delta; UNSET if it has none."""
    rows = part.routed_experts
    if rows is None:
        return UNSET
    if form == "raw":
        return RawRoutedExperts(rows.tobytes(), list(rows.shape), rows.dtype.str, part.routed_experts_start)
    return npy_bytes(rows)


def npy_bytes(array: np.ndarray) -> bytes:
    """Return an array as the content of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def compact_routed_experts(rows: np.ndarray, start: int) -> RawRoutedExperts:
    """Return experts [num_tokens, num_moe_layers, top_k], the first row at position `start`, in the smallest type, by
    numpy's plain name such as "uint8"."""
    highest = int(rows.max(initial=0))
    dtype = next(np.dtype(dtype) for dtype in COMPACT_DTYPES if highest <= np.iinfo(dtype).max)
    return RawRoutedExperts(rows.astype(dtype).tobytes(), list(rows.shape), dtype.name, start)
