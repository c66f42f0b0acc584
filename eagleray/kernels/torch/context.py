"""What the layers of a model share in one forward pass in plain torch, computed once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from eagleray.kernels.torch.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardContext:
    cos: Tensor
    sin: Tensor
    """[num_tokens, 1, head_dim], see `Rope.angles`"""
    slots: Tensor
    """[num_tokens] where keys and values are cached"""
    plans: Mapping[int | None, AttentionMetadata]
    """By the window of the layer."""
