"""Parameters of rotary position embeddings, without tensors. `rope` has the formulas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DefaultRope:
    theta: float


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Linear scaling: positions are divided by `factor`."""

    theta: float
    factor: float


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """NTK scaling that sets in beyond `original_max` and grows with the length of the sequence."""

    theta: float
    factor: float
    original_max: int


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's scaling: low frequencies are divided by `factor`, high ones kept, with a smooth transition between."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): interpolation by frequency, and a factor on the attention."""

    theta: float
    factor: float
    original_max: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


RopeSpec = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope
