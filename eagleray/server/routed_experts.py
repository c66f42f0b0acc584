"""Which experts computed each token, in the forms that answers have."""

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
    """Rows of consecutive positions, prompt and completion together."""

    data: Annotated[bytes, Meta(description="The elements in C order; base64 in JSON.")]
    shape: Annotated[list[int], Meta(description="[num_tokens, num_moe_layers, top_k]")]
    dtype: Annotated[str, Meta(description='numpy\'s name of it: "|u1" or "<u2".')]
    start: Annotated[int, Meta(description="Position of the first row.")]


RoutedExpertsField = (
    Annotated[bytes, Meta(description="A .npy file of [num_tokens, num_moe_layers, top_k]; base64 in JSON.")]
    | RawRoutedExperts
    | UnsetType
)
"""Of a choice. Bytes, which JSON has as base64 and msgpack as they are."""


def routed_experts(
    part: CompletionDelta | CompletionOutput, form: Literal["npy", "raw"] | None
) -> bytes | RawRoutedExperts | UnsetType:
    """Those of a completion, or what is new of them; UNSET if there are none to tell."""
    rows = part.routed_experts
    if rows is None:
        return UNSET
    if form == "raw":
        return RawRoutedExperts(rows.tobytes(), list(rows.shape), rows.dtype.str, part.routed_experts_start)
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()
