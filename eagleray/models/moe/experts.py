"""The mixture-of-experts feed-forward layer: each token goes through the experts that its router chose.

A tensor-parallel rank has a share of the inner features of every expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from eagleray.models.kernels.reference import Kernels
from eagleray.models.layers.linear import load_linear
from eagleray.models.moe.router import Router
from eagleray.models.shares import equal_share
from eagleray.models.spec import MoeSpec
from eagleray.models.weights import Cut, Weights
from eagleray.parallel import Group

__all__ = ["Experts", "MoeBlock", "SmallExperts", "load_experts"]

SMALL_LAYER = 2_000_000
"""Expert weights of a layer. Up to this size, starting a product for each expert costs more than computing them all."""

ComputeExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [num_tokens, hidden_size], expert ids and weights [num_tokens, top_k] -> [num_tokens, hidden_size]"""


def load_experts(
    name: str,
    moe: MoeSpec,
    hidden_size: int,
    weights: Weights,
    kernels: Kernels,
    tp: Group,
    *,
    projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> ComputeExperts:
    """This rank's part of the experts. `projections`: what the checkpoint calls an expert's gate, up and down
    projection."""
    names = [[f"{name}.{expert}.{part}" for part in projections] for expert in range(moe.num_experts)]
    inner = equal_share(moe.intermediate_size, tp)
    is_small = 3 * moe.num_experts * len(inner) * hidden_size <= SMALL_LAYER
    return (SmallExperts if is_small else Experts)(names, moe, hidden_size, inner, weights, kernels)


class SmallExperts:
    """Every token goes through every expert, in two products; those that it did not choose weigh zero.

    `inner`: which of the experts' inner features are computed here.
    """

    def __init__(
        self, names: list[list[str]], moe: MoeSpec, hidden_size: int, inner: range, weights: Weights, kernels: Kernels
    ) -> None:
        self._num_experts, size = moe.num_experts, moe.intermediate_size
        gates_then_ups = [gate for gate, _, _ in names] + [up for _, up, _ in names]
        sizes, outputs = [size] * len(gates_then_ups), [inner] * len(gates_then_ups)
        self._gate_up = load_linear(weights, kernels, gates_then_ups, sizes, hidden_size, outputs=outputs)
        downs = [f"{down}.weight" for _, _, down in names]
        count = moe.num_experts
        down = weights.take_rows(downs, [(hidden_size, size)] * count, [Cut(1, inner)] * count)
        # [experts, hidden_size, inner] -> [hidden_size, experts * inner]: the sum over experts is part of the product
        side_by_side = down.view(count, hidden_size, -1).transpose(0, 1).reshape(hidden_size, -1)
        self._down = kernels.linear(side_by_side, None)
        self._kernels = kernels

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        inner = self._kernels.silu_and_mul(self._gate_up(x))  # [num_tokens, num_experts * inner]
        share = expert_weights.new_zeros(len(x), self._num_experts).scatter_(1, expert_ids, expert_weights)
        weighted = inner.view(len(x), self._num_experts, -1) * share[:, :, None]
        return self._down(weighted.flatten(1).to(x.dtype))


class Experts:
    """Each token goes through the experts that it chose. `inner` as in `SmallExperts`."""

    def __init__(
        self, names: list[list[str]], moe: MoeSpec, hidden_size: int, inner: range, weights: Weights, kernels: Kernels
    ) -> None:
        size = moe.intermediate_size
        self._gate_up = [
            load_linear(weights, kernels, [gate, up], [size, size], hidden_size, outputs=[inner, inner])
            for gate, up, _ in names
        ]
        self._down = [
            kernels.linear(weights.take(f"{down}.weight", (hidden_size, size), Cut(1, inner)), None)
            for _, _, down in names
        ]
        self._kernels = kernels

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        return self._kernels.experts(x, expert_ids, expert_weights, self._gate_up, self._down)


class MoeBlock:
    """The router is the same on every rank, so that all choose the same experts."""

    def __init__(self, router: Router, experts: ComputeExperts, tp: Group) -> None:
        self._router = router
        self._experts = experts
        self._tp = tp

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size], in and out"""
        return self._tp.all_reduce(self._experts(x, *self._router(x)))
