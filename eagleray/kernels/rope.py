"""Rotary position embedding: the angles of every position, with all scalings that checkpoints ask for.

Formulas as in transformers' modeling_rope_utils, so that checkpoints mean the same. One differs on purpose: with
`dynamic` scaling transformers uses the frequencies of the longest position of the current call, while keys cached
earlier keep theirs, so its results depend on how a prompt was cut. Here position p always uses the frequencies of a
sequence that ends with it. Both agree for text generated token by token from a prompt within the original length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagleray.kernels.rope_spec import DefaultRope, DynamicRope, LinearRope, Llama3Rope, RopeSpec, YarnRope


class Rope:
    def __init__(self, spec: RopeSpec, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dynamic = spec if isinstance(spec, DynamicRope) else None
        self._scale = spec.attention_factor if isinstance(spec, YarnRope) else 1.0
        self._dtype = dtype
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self._exponents = exponents.to(device)  # [head_dim / 2]
        self._frequencies = _frequencies(spec, exponents).to(device)  # [head_dim / 2] radians per position

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [num_tokens, 1, head_dim] of `positions` [num_tokens] in the form of
        `torch.functional.rotate`."""
        cos, sin = (part.to(self._dtype) for part in self.table(positions))
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, float32 [num_tokens, head_dim / 2], of `positions` [num_tokens]."""
        frequencies = self._frequencies if self._dynamic is None else self._scaled(self._dynamic, positions)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self._scale == 1.0 else (cos * self._scale, sin * self._scale)

    def _scaled(self, spec: DynamicRope, positions: Tensor) -> Tensor:
        """Return frequencies [num_tokens, head_dim / 2] for each position as the last one of its sequence."""
        size = 2 * len(self._exponents)
        beyond = (positions[:, None].double() + 1).clamp_(min=spec.original_max) / spec.original_max - 1
        theta = spec.theta * (1 + spec.factor * beyond) ** (size / (size - 2))
        return (1.0 / theta ** self._exponents.double()).float()


def _frequencies(spec: RopeSpec, exponents: Tensor) -> Tensor:
    plain = 1.0 / (spec.theta**exponents)
    match spec:
        case DefaultRope() | DynamicRope():
            return plain
        case LinearRope():
            return plain / spec.factor
        case Llama3Rope():
            return _llama3(spec, plain)
        case YarnRope():
            return _yarn(spec, exponents)


def _llama3(spec: Llama3Rope, plain: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / plain
    smooth = (spec.original_max / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between = (1 - smooth) * plain / spec.factor + smooth * plain
    kept_or_between = torch.where(wavelengths < spec.original_max / spec.high_freq_factor, plain, between)
    return torch.where(wavelengths > spec.original_max / spec.low_freq_factor, plain / spec.factor, kept_or_between)


def _yarn(spec: YarnRope, exponents: Tensor) -> Tensor:
    size = 2 * len(exponents)

    def dimension(rotations: float) -> float:
        """Return the dimension that makes this number of rotations over the original length."""
        return size * math.log(spec.original_max / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a step in place of a ramp
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = spec.theta**exponents
    return (1.0 / (spec.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
