"""The mixture-of-experts feed-forward layer: each token goes through the experts that the router chose for it.

Every rank has the whole router, and the experts, or the shard of each, that `ExpertLayout` assigns to it. A layer may
also have shared experts, a feed-forward layer that computes every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagleray.kernels.backend import HiddenStates, KernelBackend, Operation, OperationWithWeights
from eagleray.models.layers.linear import load_linear
from eagleray.models.layers.mlp import MLP
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.sharding import shard
from eagleray.models.spec import ModelSpec, MoeSpec
from eagleray.models.weights import Cut, Weights
from eagleray.parallel.group import SingleRankGroup

Expert = tuple[OperationWithWeights, OperationWithWeights]
"""(the gated product, the product that leads back into the hidden state)"""

LoadExpert = Callable[[int, Weights], Expert]
"""Loads an expert by its number, or this rank's shard of it."""


class MoeBlock:
    """The routed experts of one layer, and its shared experts.

    `projections`: the checkpoint's names of an expert's gate, up and down projection; `load_expert` replaces them for
    checkpoints that store experts in another form. `router` maps hidden states to scores; by default it is the product
    with `{name}.gate`. `shared`: see `load_shared_experts`.
    """

    def __init__(
        self,
        name: str,
        index: int,
        spec: ModelSpec,
        weights: Weights,
        kernels: KernelBackend,
        layout: ExpertLayout,
        *,
        projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        load_expert: LoadExpert | None = None,
        router: Operation | None = None,
        shared: Operation | None = None,
    ) -> None:
        assert spec.moe is not None
        moe, hidden = spec.moe, spec.hidden_size
        self._kernels = kernels
        self._layout = layout
        self._size = hidden
        self._shared = shared
        self.moe_index = layout.moe_index(index)
        """The index of this layer among the stage's layers with experts."""
        self.slots = layout.slots(index)
        """None if this rank has a shard of every expert."""
        self.load_expert = load_expert or _expert_loader(name, moe, hidden, kernels, layout, projections)
        here = range(moe.num_experts) if self.slots is None else self.slots.local_experts
        experts = [self.load_expert(expert, weights) for expert in here]
        gate_up, down = [first for first, _ in experts], [last for _, last in experts]
        self.products = kernels.expert_products(gate_up, down)
        """The products of this rank's experts, by expert slot."""
        self._router = router or load_linear(
            weights, kernels, [f"{name}.gate"], [moe.num_experts], hidden, is_quantizable=False
        )
        self._router_params = moe.router
        if moe.has_correction_bias:
            bias_name = f"{name}.gate.e_score_correction_bias"
            bias = weights.load(bias_name, (moe.num_experts,), dtype=torch.float32)
            self._router_params = replace(moe.router, correction_bias=bias)
        self._experts = kernels.experts(
            self._router_params,
            gate_up,
            down,
            slots=None if self.slots is None else self.slots.local_map,
            trace=layout.trace,
            layer=self.moe_index,
        )

    def __call__(self, x: HiddenStates) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape; with `layout.sequence_parallel` these are this
        rank's tokens."""
        scores = self._router(x)
        if self._layout.dispatcher is not None:
            out = self._kernels.host(self._exchange, [x, scores], size=self._size)
        else:
            out = self._experts(x, scores)
        if self._shared is not None:
            out = self._kernels.add(out, self._shared(x))
        return out if self._layout.dispatcher is not None else self._kernels.all_reduce(out, self._layout.tp)

    def _exchange(self, x: Tensor, scores: Tensor) -> Tensor:
        layout = self._layout
        assert layout.dispatcher is not None and self.slots is not None
        ids, weights = self._kernels.route(scores, self._router_params)
        layout.trace.record(self.moe_index, ids)
        out = layout.dispatcher(x, ids, weights, self.products, self.slots, layout.token_counts)
        return out.to(self._kernels.hidden_dtype(x.dtype))


def load_shared_experts(
    name: str, spec: ModelSpec, weights: Weights, kernels: KernelBackend, layout: ExpertLayout
) -> Operation | None:
    """Return the shared experts of the layer `name` as one operation, or None if the model has no shared experts. They
    are whole if each rank has tokens of its own; otherwise they are this rank's shard, whose output `MoeBlock` adds to
    that of the routed experts before the sum over the ranks."""
    assert spec.moe is not None
    size = spec.moe.shared_intermediate_size
    if size == 0:
        return None
    tp = layout.tp if layout.dispatcher is None else SingleRankGroup()
    return MLP(
        f"{name}.shared_experts",
        weights,
        kernels,
        tp,
        hidden_size=spec.hidden_size,
        size=size,
        bias=spec.mlp_bias,
        is_summed=False,
    )


def _expert_loader(
    name: str, moe: MoeSpec, hidden_size: int, kernels: KernelBackend, layout: ExpertLayout, projections: Sequence[str]
) -> LoadExpert:
    size = moe.intermediate_size
    inner = range(size) if layout.is_divided else shard(size, layout.tp)

    def load(expert: int, weights: Weights) -> Expert:
        gate, up, down = (f"{name}.experts.{expert}.{part}" for part in projections)
        outputs = [inner, inner]
        return (
            load_linear(weights, kernels, [gate, up], [size, size], hidden_size, outputs=outputs, gated=True),
            kernels.linear(weights.load_weight([f"{down}.weight"], [(hidden_size, size)], [Cut(1, inner)]), None),
        )

    return load
