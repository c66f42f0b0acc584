"""/skyrl/v1/generate: /inference/v1/generate with routed experts in the form that SkyRL's client reads."""

from __future__ import annotations

import numpy as np

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.server.generate import AnyLogprobs, GenerateChoice, ParsedGenerate
from eagleray.server.routed_experts import RawRoutedExperts

DTYPES = (np.uint8, np.int16, np.int32)
"""Types of expert numbers. The client accepts only the first one that has all numbers of the array."""


class ParsedSkyrlGenerate(ParsedGenerate):
    path = "/skyrl/v1/generate"
    summary = "Continue token ids. Routed experts are objects of `data`, `shape`, `dtype` and `start`."

    def _make_choice(self, part: CompletionDelta | CompletionOutput, logprobs: AnyLogprobs | None) -> GenerateChoice:
        choice = super()._make_choice(part, logprobs)
        if part.routed_experts is not None:
            choice.routed_experts = compact_routed_experts(part.routed_experts, part.routed_experts_start)
        return choice


def compact_routed_experts(rows: np.ndarray, start: int) -> RawRoutedExperts:
    """Return experts [num_tokens, num_moe_layers, top_k], the first row at position `start`, in the smallest type, by
    numpy's plain name such as "uint8"."""
    highest = int(rows.max(initial=0))
    dtype = next(np.dtype(dtype) for dtype in DTYPES if highest <= np.iinfo(dtype).max)
    return RawRoutedExperts(rows.astype(dtype).tobytes(), list(rows.shape), dtype.name, start)
