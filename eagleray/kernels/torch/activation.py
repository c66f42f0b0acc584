"""What a gate does to what it gates, beside silu(gate) * up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gate * sigmoid(alpha * gate) * (up + 1), with `gate` at most `limit` and `up` between -limit and limit: as in
    transformers' modeling_gpt_oss."""

    alpha: float
    limit: float


def clamped_swiglu(gate_up: Tensor, clamp: ClampedSwiglu) -> Tensor:
    """[n, 2 * size], gates and behind them what they gate -> [n, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))
