"""Parameters of the operations that are more than a weight: attention, the choice of experts, gates.

Made by the layers when a model is loaded, read by the backends. Weights are those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagleray.kernels.storage import memory_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """Attention of one layer, with this rank's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """Number of positions that a position sees, itself included; None: all up to and including itself."""
    q_norm: Tensor | None
    """[head_dim] weight of the RMS norm of each query head, if queries and keys are normalized"""
    k_norm: Tensor | None
    """[head_dim] weight of the RMS norm of each key head"""
    norm_eps: float
    sinks: Tensor | None = None
    """[num_heads] score of each head for a key without a value, which takes a part of the head's probabilities"""

    def storage(self) -> list[Tensor]:
        """Return the memory of the tensors, which must be contiguous, see `OwnsWeights`."""
        return memory_of(self.q_norm, self.k_norm, self.sinks)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAParams:
    """Multi-head latent attention of one layer, with this rank's heads. Every rank has the whole latent."""

    num_heads: int
    plain_dim: int
    """Features of a head's query and key that are not rotated; the rotated ones follow them."""
    rotated_dim: int
    value_dim: int
    scale: float
    """Factor of the scores."""
    norm: Tensor
    """[rank] weight of the latent's RMS norm"""
    norm_eps: float
    keys: Tensor
    """[num_heads, plain_dim, rank] maps a latent to the plain part of each head's key"""
    values: Tensor
    """[num_heads, value_dim, rank] maps a latent to each head's value"""

    def storage(self) -> list[Tensor]:
        """Return the memory of the tensors, which must be contiguous, see `OwnsWeights`."""
        return memory_of(self.norm, self.keys, self.values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterParams:
    """Rules by which a layer chooses and weights the experts of each token."""

    top_k: int
    renormalize: bool
    """Divide the weights of a token's experts by their sum."""
    round_weights: bool
    """Round the weights to the model's dtype before the outputs are summed."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function that makes probabilities of the router's scores."""
    correction_bias: Tensor | None = None
    """float32 [num_experts], added to the probabilities for the choice of experts, not for their weights"""
    num_groups: int = 1
    """Consecutive experts form a group; only experts of the best `top_groups` groups are candidates."""
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """Score of a group: that of its best expert, or the sum of its two best."""
    scale: float = 1.0
    """Factor of the final weights."""
    renormalize_eps: float = 0.0
    """Added to the sum that weights are divided by."""

    def check(self, num_experts: int) -> None:
        """Assert that a choice is possible. User errors are reported where config.json is read."""
        size = num_experts // self.num_groups
        assert size * self.num_groups == num_experts, "the groups divide the experts"
        assert 1 <= self.top_groups <= self.num_groups
        assert 1 <= self.top_k <= size * self.top_groups, "the best groups have enough experts"
        assert self.num_groups == 1 or self.group_score == "max" or size >= 2
        bias = self.correction_bias
        assert bias is None or (bias.dtype == torch.float32 and bias.shape == (num_experts,) and bias.is_contiguous())

    def storage(self) -> list[Tensor]:
        """Return the memory of the tensors, see `OwnsWeights`."""
        return memory_of(self.correction_bias)


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The gate of gpt-oss in place of silu(gate) * up: gate * sigmoid(alpha * gate) * (up + 1), where `gate` is at most
    `limit` and `up` lies between -limit and limit. Formula as in transformers' modeling_gpt_oss."""

    alpha: float
    limit: float
