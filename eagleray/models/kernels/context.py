"""What the layers of a model share in one forward pass in plain torch, computed once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from eagleray.models.kernels.attention import AttentionPlan

__all__ = ["ForwardContext"]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    cos: Tensor
    sin: Tensor
    """[num_tokens, 1, head_dim], see `Rope.angles`"""
    slots: Tensor
    """[num_tokens] where keys and values are cached"""
    plans: Mapping[int | None, AttentionPlan]
    """By the window of the layer."""
