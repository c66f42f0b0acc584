"""The mixture-of-experts feed-forward layer: each token goes through the experts that the router chose for it.

Every rank has the whole router, and the experts, or the shard of each, that `ExpertLayout` assigns to it. A layer may
also have shared experts, a feed-forward layer that computes every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagleray.kernels.backend import ComputeExperts, ExpertProducts, HiddenStates, KernelBackend, OperationWithWeights
from eagleray.kernels.expert_slots import ABSENT, LayerExpertSlots
from eagleray.kernels.params import RouterParams
from eagleray.models.layers.layer import Layer, WeightGroup
from eagleray.models.layers.linear import linear, partial_linear
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.part import ModelPart
from eagleray.models.sharding import shard
from eagleray.models.weights import Alias, Cut, Param, Weights
from eagleray.parallel.group import SingleRankGroup

Expert = tuple[OperationWithWeights, OperationWithWeights]
"""(the gated product, the product that leads back into the hidden state)"""

DeclareExpert = Callable[[int], WeightGroup]
"""Declares an expert by its number, or this rank's shard of it. The group's operation is an `Expert`."""


class MoeBlock(Layer):
    """The routed experts of one layer, and its shared experts.

    `router` maps hidden states to scores; by default it is the product with `{name}.gate`. `expert` declares the
    experts; by default they are `gated_expert`s, which have `fused_experts` as aliases. `shared`: the model's shared
    experts, if it has some.
    """

    def __init__(
        self,
        name: str,
        index: int,
        part: ModelPart,
        layout: ExpertLayout,
        *,
        expert: DeclareExpert | None = None,
        router: WeightGroup | None = None,
        shared: SharedExperts | None = None,
        aliases: Sequence[Alias] | None = None,
    ) -> None:
        assert part.spec.moe is not None
        moe, hidden = part.spec.moe, part.spec.hidden_size
        self._kernels = part.kernels
        self._layout = layout
        self._size = hidden
        self._num_experts = moe.num_experts
        self._index = index
        self.expert = expert or gated_expert(f"{name}.experts", part, layout)
        self._aliases = aliases or ([] if expert else fused_experts(f"{name}.experts", f"{name}.experts", part))
        self._router = router or linear([f"{name}.gate"], [moe.num_experts], hidden, is_quantizable=False)
        self._correction_bias = None
        if moe.has_correction_bias:
            self._correction_bias = _correction_bias(f"{name}.gate.e_score_correction_bias", moe.num_experts)
        self._shared = shared
        self._router_params: RouterParams = moe.router
        self._made: list[Expert] = []
        """The experts in this rank's slots."""
        self._products: ExpertProducts | None = None
        self._experts: ComputeExperts | None = None

    def load(self, weights: Weights, kernels: KernelBackend) -> None:
        super().load(weights, kernels)
        if ABSENT not in self.local_experts:  # else `resize` makes them
            self._set_experts([self.expert(expert).make(weights, kernels) for expert in self.local_experts])
        if self._correction_bias is not None:
            self._router_params = replace(self._router_params, correction_bias=self._correction_bias.operation)
        if self._layout.dispatcher is not None:
            return  # `_exchange` routes the tokens
        self._experts = kernels.experts(
            self._router_params,
            [first for first, _ in self._made],
            [last for _, last in self._made],
            slots=None if self.slots is None else self.slots.local_map,
            trace=self._layout.trace,
            layer=self.moe_index,
        )

    def resize(self, num_slots: int, weights: Weights) -> None:
        """Change the number of this rank's expert slots. Added slots are empty; the `weights` that their memory gets do
        not matter."""
        slots, num_added = self.slots, num_slots - len(self._made)
        assert slots is not None
        if num_added == 0:
            return
        kept = self._made[:num_slots]
        slots.local_experts = [*slots.local_experts[: len(kept)], *[ABSENT] * num_added]
        self._set_experts([*kept, *(self.expert(0).make(weights, self._kernels) for _ in range(num_added))])

    def _set_experts(self, experts: list[Expert]) -> None:
        self._made = experts
        self._products = self._kernels.expert_products([first for first, _ in experts], [last for _, last in experts])

    def groups(self) -> Iterator[WeightGroup]:
        yield from super().groups()
        for expert in self.local_experts:
            if expert != ABSENT:
                yield PlacedExpert(self, expert)

    def storage(self) -> Iterator[Tensor]:
        yield from super().storage()
        for slot in range(self.products.num_slots):
            yield from self.products.storage(slot)

    def names(self) -> Iterator[str]:
        yield from super().names()
        yield from dict.fromkeys(name for expert in range(self._num_experts) for name in self.expert(expert).names())

    def aliases(self) -> Iterator[Alias]:
        yield from super().aliases()
        yield from self._aliases

    @property
    def moe_index(self) -> int:
        """The index of this layer among the stage's layers with experts."""
        return self._layout.moe_index(self._index)

    @property
    def slots(self) -> LayerExpertSlots | None:
        """The expert slots; None if this rank has a shard of every expert."""
        return self._layout.slots(self._index)

    @property
    def local_experts(self) -> Sequence[int]:
        """The experts that this rank has, by expert slot; -1 for an empty one."""
        return range(self._num_experts) if self.slots is None else self.slots.local_experts

    @property
    def products(self) -> ExpertProducts:
        """The products of this rank's experts, by expert slot."""
        assert self._products is not None, "the experts are loaded"
        return self._products

    def __call__(self, x: HiddenStates) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape; with `layout.sequence_parallel` these are this
        rank's tokens."""
        scores = self._router(x)
        if self._layout.dispatcher is not None:
            out = self._kernels.host(self._exchange, [x, scores], size=self._size)
        else:
            assert self._experts is not None, "the experts are loaded"
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


class PlacedExpert(WeightGroup):
    """An expert that this rank has in one or several expert slots of a layer."""

    def __init__(self, block: MoeBlock, expert: int) -> None:
        declared = block.expert(expert)
        super().__init__(declared.params, declared.make, alternative=declared.alternative)
        self._block = block
        self._expert = expert

    def places(self) -> list[list[Tensor]]:
        slots = (slot for slot, expert in enumerate(self._block.local_experts) if expert == self._expert)
        return [self._block.products.storage(slot) for slot in slots]


class SharedExperts(Layer):
    """A feed-forward layer that computes every token. It is whole if each rank has tokens of its own; otherwise it is
    this rank's shard, whose output `MoeBlock` adds to that of the routed experts before the sum over the ranks."""

    def __init__(self, name: str, part: ModelPart, layout: ExpertLayout) -> None:
        assert part.spec.moe is not None
        hidden, size, bias = part.spec.hidden_size, part.spec.moe.shared_intermediate_size, part.spec.mlp_bias
        tp = part.tp if layout.dispatcher is None else SingleRankGroup()
        inner = shard(size, tp)
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self._gate_up = linear(names, [size, size], hidden, outputs=[inner, inner], bias=bias, gated=True)
        self._down = partial_linear(f"{name}.down_proj", hidden, size, inputs=inner, tp=tp, bias=bias)

    def __call__(self, x: HiddenStates) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape."""
        return self._down(self._gate_up(x))


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The usual names of an expert's gate, up and down projection."""


def gated_expert(
    name: str, part: ModelPart, layout: ExpertLayout, projections: Sequence[str] = PROJECTIONS
) -> DeclareExpert:
    """Return the declaration of experts that have tensors of their own. `projections`: the checkpoint's names of an
    expert's gate, up and down projection."""
    assert part.spec.moe is not None
    hidden, size = part.spec.hidden_size, part.spec.moe.intermediate_size
    inner = range(size) if layout.is_divided else shard(size, layout.tp)

    def declare(expert: int) -> WeightGroup:
        gate, up, down = (f"{name}.{expert}.{projection}.weight" for projection in projections)
        gates = [Param(each, (size, hidden), Cut(0, inner)) for each in (gate, up)]
        back = Param(down, (hidden, size), Cut(1, inner))

        def make(weights: Weights, kernels: KernelBackend) -> Expert:
            gated = kernels.gated_linear(weights.load_weight(gates), None)
            return gated, kernels.linear(weights.load_weight([back]), None)

        return WeightGroup([*gates, back], make)

    return declare


def fused_experts(fused: str, name: str, part: ModelPart, projections: Sequence[str] = PROJECTIONS) -> list[Alias]:
    """Return the form in which modules of transformers 5 have the experts `name`: in two tensors, `fused`.gate_up_proj
    and `fused`.down_proj."""
    assert part.spec.moe is not None
    count, size, hidden = part.spec.moe.num_experts, part.spec.moe.intermediate_size, part.spec.hidden_size
    gate, up, down = projections

    def split_gate_up(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for expert, matrix in enumerate(tensor):
            yield f"{name}.{expert}.{gate}.weight", matrix[:size]
            yield f"{name}.{expert}.{up}.weight", matrix[size:]

    def split_down(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for expert, matrix in enumerate(tensor):
            yield f"{name}.{expert}.{down}.weight", matrix

    return [
        Alias(f"{fused}.gate_up_proj", (count, 2 * size, hidden), split_gate_up),
        Alias(f"{fused}.down_proj", (count, hidden, size), split_down),
    ]


def _correction_bias(name: str, num_experts: int) -> WeightGroup:
    bias = Param(name, (num_experts,), dtype=torch.float32)
    return WeightGroup([bias], lambda weights, kernels: weights.load(bias))
