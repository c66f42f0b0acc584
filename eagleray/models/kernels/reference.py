"""The operations of the layers in plain torch. They define what every faster kernel must compute.

Run on tensors of any device. Numbers: bfloat16 and float16 are rounded where transformers rounds them, or less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.models.batch import Batch
from eagleray.models.kernels.attention import AttentionPlan, attend, plan_attention
from eagleray.models.kernels.experts import compute_experts

__all__ = ["Kernels", "LinearKernel", "PlainLinear"]


class LinearKernel(Protocol):
    """A weight (and bias) made ready for products."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]"""
        ...


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class Kernels:
    """Chosen once for a device when a model is loaded; a device's own class overrides what it does better."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        """Takes over a weight [out_features, in_features]; it may be kept in another layout, and only in that one."""
        return PlainLinear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) over the last dimension, in float32, times `weight` (broadcast from the right)."""
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * size]: silu of the first half, times the second half -> [n, size]"""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Rotate heads by position: x, out [num_tokens, heads, head_dim] (may be the same); cos, sin
        [num_tokens, 1, head_dim], where the first half of `sin` is negated."""
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        torch.mul(x, cos, out=out).addcmul_(swapped, sin)

    def write_cache(self, keys_values: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Put keys and values [num_tokens, 2 * num_kv_heads, head_dim] into their slots of a layer's cache."""
        if keys_values.dtype == torch.float16:
            # an overflow must stay its own request's: other rows read this block as padding, and 0 x inf is NaN
            keys_values = keys_values.nan_to_num()
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, keys_values)

    def plan_attention(self, batch: Batch, cache: Tensor, window: int | None) -> AttentionPlan:
        """What all layers with this window share in one batch; `cache` is that of any layer."""
        return plan_attention(batch, cache, window)

    def attention(self, queries: Tensor, keys_values: Tensor, cache: Tensor, plan: AttentionPlan) -> Tensor:
        """Attention of queries [num_tokens, num_heads, head_dim] over their rows' cached context, to which
        `keys_values` (as in `write_cache`) have been written already -> [num_tokens, num_heads * head_dim]."""
        return attend(queries, keys_values, cache, plan)

    def experts(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: Sequence[LinearKernel],
        down: Sequence[LinearKernel],
    ) -> Tensor:
        """Weighted sum of what each token's experts compute: x [num_tokens, hidden_size], expert_ids and
        expert_weights [num_tokens, top_k] -> [num_tokens, hidden_size]; `gate_up` and `down` are indexed by expert."""
        return compute_experts(x, expert_ids, expert_weights, gate_up, down, self.silu_and_mul)
