"""The mixture-of-experts feed-forward layer: each token goes through the experts that the router chose for it.

A tensor-parallel rank has a share of the inner features of every expert, and the whole router, so that all ranks choose
the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.models.kernels.reference import Kernels, Mixture, Operation, Rows
from eagleray.models.layers.linear import load_linear
from eagleray.models.shares import equal_share
from eagleray.models.spec import MoeSpec
from eagleray.models.weights import Cut, Weights
from eagleray.parallel import Group

__all__ = ["MoeBlock"]


class MoeBlock:
    """`projections`: what the checkpoint calls an expert's gate, up and down projection. `round_weights`: see
    `Mixture`."""

    def __init__(
        self,
        name: str,
        moe: MoeSpec,
        hidden_size: int,
        weights: Weights,
        kernels: Kernels,
        tp: Group,
        *,
        projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        round_weights: bool = True,
    ) -> None:
        size, inner = moe.intermediate_size, equal_share(moe.intermediate_size, tp)
        gate_up: list[Operation] = []
        down: list[Operation] = []
        for expert in range(moe.num_experts):
            gate, up, last = (f"{name}.experts.{expert}.{part}" for part in projections)
            outputs = [inner, inner]
            gate_up.append(
                load_linear(weights, kernels, [gate, up], [size, size], hidden_size, outputs=outputs, gated=True)
            )
            down.append(kernels.linear(weights.take(f"{last}.weight", (hidden_size, size), Cut(1, inner)), None))
        self._router = load_linear(weights, kernels, [f"{name}.gate"], [moe.num_experts], hidden_size)
        mixture = Mixture(top_k=moe.top_k, renormalize=moe.renormalize, round_weights=round_weights)
        self._experts = kernels.experts(mixture, gate_up, down)
        self._kernels = kernels
        self._tp = tp

    def __call__(self, x: Rows) -> Rows:
        """[num_tokens, hidden_size], in and out"""
        return self._kernels.all_reduce(self._experts(x, self._router(x)), self._tp)
