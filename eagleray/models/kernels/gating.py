"""What a gate does to what it gates, beside silu(gate) * up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Clamp", "clamped_gate"]


@dataclass(frozen=True, slots=True)
class Clamp:
    """gate * sigmoid(alpha * gate) * (up + 1), with `gate` at most `limit` and `up` between -limit and limit: as in
    transformers' modeling_gpt_oss."""

    alpha: float
    limit: float


def clamped_gate(gate_up: Tensor, clamp: Clamp) -> Tensor:
    """[n, 2 * size], gates and behind them what they gate -> [n, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))
