"""The mixture-of-experts feed-forward layer: each token goes through the experts that its router chose."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eagleray.models.kernels.reference import Kernels
from eagleray.models.layers.linear import load_linear
from eagleray.models.moe.router import Router
from eagleray.models.spec import MoeSpec
from eagleray.models.weights import Weights

__all__ = ["Experts", "MoeBlock"]


class Experts:
    """`projections`: what the checkpoint calls an expert's gate, up and down projection."""

    def __init__(
        self,
        name: str,
        moe: MoeSpec,
        hidden_size: int,
        weights: Weights,
        kernels: Kernels,
        *,
        projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        size = moe.intermediate_size
        names = [[f"{name}.{expert}.{part}" for part in projections] for expert in range(moe.num_experts)]
        self._gate_up = [load_linear(weights, kernels, [gate, up], [size, size], hidden_size) for gate, up, _ in names]
        self._down = [load_linear(weights, kernels, [down], [hidden_size], size) for _, _, down in names]
        self._kernels = kernels

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x [num_tokens, hidden_size], ids and weights [num_tokens, top_k] -> [num_tokens, hidden_size]"""
        return self._kernels.experts(x, expert_ids, expert_weights, self._gate_up, self._down)


class MoeBlock:
    def __init__(self, router: Router, experts: Experts) -> None:
        self._router = router
        self._experts = experts

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size], in and out"""
        return self._experts(x, *self._router(x))
