"""The mixture-of-experts feed-forward layer: each token goes through the experts that the router chose for it.

Every rank has the whole router, and the experts, or the part of each, that `ExpertLayout` assigns to it. A layer may
also have shared experts, a feed-forward layer that computes every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagleray.kernels.backend import HiddenStates, KernelBackend, Operation
from eagleray.kernels.params import RouterParams
from eagleray.models.layers.linear import load_linear
from eagleray.models.layers.mlp import MLP
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.sharding import shard
from eagleray.models.spec import ModelSpec, MoeSpec
from eagleray.models.weights import Cut, Weights
from eagleray.parallel.group import SingleRankGroup

Expert = tuple[Operation, Operation]
"""Its gated product, and the one that leads back into the hidden state."""

LoadExpert = Callable[[int, Weights], Expert]
"""Takes the weights of an expert, or of this rank's part of it."""


class MoeBlock:
    """`projections`: what the checkpoint calls an expert's gate, up and down projection; `load_expert`: for checkpoints
    that have them in another form. `round_weights`: see `RouterParams`. `router`: in place of a product with
    `{name}.gate`, rows to scores. `shared`: see `load_shared_experts`.
    """

    def __init__(
        self,
        name: str,
        index: int,
        spec: ModelSpec,
        weights: Weights,
        kernels: KernelBackend,
        plan: ExpertLayout,
        *,
        projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        load_expert: LoadExpert | None = None,
        round_weights: bool = True,
        router: Operation | None = None,
        shared: Operation | None = None,
    ) -> None:
        assert spec.moe is not None
        moe, hidden = spec.moe, spec.hidden_size
        self._kernels = kernels
        self._plan = plan
        self._size = hidden
        self._shared = shared
        self.number = plan.number(index)
        """Which of the stage's layers with experts it is."""
        self.slots = plan.slots(index)
        """None: every expert is here, cut."""
        self.load_expert = load_expert or _expert_loader(name, moe, hidden, kernels, plan, projections)
        here = range(moe.num_experts) if self.slots is None else self.slots.local_experts
        experts = [self.load_expert(expert, weights) for expert in here]
        gate_up, down = [first for first, _ in experts], [last for _, last in experts]
        self.products = kernels.expert_products(gate_up, down)
        """Of the experts that are here, by slot."""
        self._router = router or load_linear(weights, kernels, [f"{name}.gate"], [moe.num_experts], hidden)
        self._mixture = make_mixture(name, moe, weights, round_weights=round_weights)
        self._experts = kernels.experts(
            self._mixture,
            gate_up,
            down,
            slots=None if self.slots is None else self.slots.local_map,
            trace=plan.trace,
            layer=self.number,
        )

    def __call__(self, x: HiddenStates) -> HiddenStates:
        """[num_tokens, hidden_size], in and out; with `plan.sequence_parallel`, of the rank's share of the tokens"""
        scores = self._router(x)
        if self._plan.dispatch is not None:
            out = self._kernels.host(self._exchange, [x, scores], size=self._size)
        else:
            out = self._experts(x, scores)
        if self._shared is not None:
            out = self._kernels.add(out, self._shared(x))
        return out if self._plan.dispatch is not None else self._kernels.all_reduce(out, self._plan.tp)

    def _exchange(self, x: Tensor, scores: Tensor) -> Tensor:
        plan = self._plan
        assert plan.dispatch is not None and self.slots is not None
        ids, weights = self._kernels.route(scores, self._mixture)
        plan.trace.record(self.number, ids)
        out = plan.dispatch(x, ids, weights, self.products, self.slots, plan.row_counts)
        return out.to(self._kernels.hidden_dtype(x.dtype))


def make_mixture(name: str, moe: MoeSpec, weights: Weights, *, round_weights: bool) -> RouterParams:
    """`name`: of the layer, whose correction bias is taken if it has one."""
    bias = None
    if moe.has_correction_bias:
        bias = weights.load(f"{name}.gate.e_score_correction_bias", (moe.num_experts,), dtype=torch.float32)
    return RouterParams(
        top_k=moe.top_k,
        renormalize=moe.renormalize,
        round_weights=round_weights,
        scoring=moe.scoring,
        correction_bias=bias,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        group_score=moe.group_score,
        scale=moe.scale,
        renormalize_eps=moe.renormalize_eps,
    )


def load_shared_experts(
    name: str, spec: ModelSpec, weights: Weights, kernels: KernelBackend, plan: ExpertLayout
) -> Operation | None:
    """The shared experts of the layer `name`, as one: whole where each rank has tokens of its own, else this rank's
    part, which `MoeBlock` sums up with those of the routed experts. None if there are none."""
    assert spec.moe is not None
    size = spec.moe.shared_intermediate_size
    if size == 0:
        return None
    tp = plan.tp if plan.dispatch is None else SingleRankGroup()
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
    name: str, moe: MoeSpec, hidden_size: int, kernels: KernelBackend, plan: ExpertLayout, projections: Sequence[str]
) -> LoadExpert:
    size = moe.intermediate_size
    inner = range(size) if plan.is_divided else shard(size, plan.tp)

    def load(expert: int, weights: Weights) -> Expert:
        gate, up, down = (f"{name}.experts.{expert}.{part}" for part in projections)
        outputs = [inner, inner]
        return (
            load_linear(weights, kernels, [gate, up], [size, size], hidden_size, outputs=outputs, gated=True),
            kernels.linear(weights.load(f"{down}.weight", (hidden_size, size), Cut(1, inner)), None),
        )

    return load
