"""Chooses the experts of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.models.kernels.reference import Kernels
from eagleray.models.layers.linear import load_linear
from eagleray.models.spec import MoeSpec
from eagleray.models.weights import Weights

__all__ = ["Router"]


class Router:
    """`weights_dtype`: of the experts' weights; what the family rounds them to before it sums up."""

    def __init__(
        self,
        name: str,
        moe: MoeSpec,
        hidden_size: int,
        weights: Weights,
        kernels: Kernels,
        *,
        weights_dtype: torch.dtype | None,
    ) -> None:
        self._scores = load_linear(weights, kernels, [name], [moe.num_experts], hidden_size)
        self._top_k = moe.top_k
        self._renormalize = moe.renormalize
        self._weights_dtype = weights_dtype

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, hidden_size] -> ids and weights of the experts of each token, [num_tokens, top_k] each."""
        probabilities = torch.softmax(self._scores(x), dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(probabilities, self._top_k, dim=-1)
        if self._renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids, weights.to(self._weights_dtype or x.dtype)
