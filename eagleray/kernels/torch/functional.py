"""Functions of hidden states that take no weights of a product: norm, gates, rotation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.params import ClampedSwiglu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) over the last dimension, computed in float32, times `weight` (broadcast from the right)."""
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu of the first half times the second half: [n, 2 * size] -> [n, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def clamped_swiglu(gate_up: Tensor, clamp: ClampedSwiglu) -> Tensor:
    """Apply `clamp` to gates and the values behind them: [n, 2 * size] -> [n, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotate heads by position: `x`, `out` [num_tokens, heads, head_dim] (possibly the same tensor); `cos`, `sin`
    [num_tokens, 1, head_dim], where the first half of `sin` is negated."""
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    torch.mul(x, cos, out=out).addcmul_(swapped, sin)
