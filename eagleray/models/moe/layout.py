"""The part of a model's experts that this rank computes, and how tokens reach the experts of other ranks. All layers
with experts share one `ExpertLayout`, which is made before them.

Without expert parallelism a rank has its shard of the inner features of every expert. With it, a rank has whole experts
in its expert slots (`expert_slots.py`), and there are two ways to use them. Either every rank of the engine has all
tokens and computes the pairs of a token and an expert that are its own, and the sums of all ranks are added up
(`dispatcher` is None). Or each rank has tokens of its own: those of its engine's batch or, if the engine has several
tensor-parallel ranks, its slice of them (`sequence_parallel`). Then `dispatcher` brings tokens to experts and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eagleray.kernels.expert_slots import ABSENT, LayerExpertSlots, Slots
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.moe.expert_placement import initial_slots
from eagleray.models.moe.token_dispatcher import AllGatherTokenDispatcher, AllToAllTokenDispatcher, TokenDispatcher
from eagleray.models.part import ModelPart
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.token_shards import token_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """The user's options for experts."""

    dispatch: Literal["all-reduce", "all-gather", "all-to-all"] | None = None
    """None: no expert parallelism."""
    num_redundant: int = 0
    """Expert slots beyond one for each expert, on all ranks together. There may be more, so that all ranks have equally
    many."""
    balance_interval: int | None = None
    """Number of steps after which experts are moved if they are not balanced; None: they stay where they are."""
    keeps_ids: bool = False
    """Whether requests may ask for the experts that computed each token."""
    gets_experts: bool = False
    """Whether this rank loads no experts, because it gets them when its group is formed."""


class ExpertLayout:
    """`tp` has the ranks of the engine's stage, `group` the ranks that divide the experts."""

    def __init__(self, part: ModelPart, options: ExpertOptions) -> None:
        spec, groups = part.spec, part.groups
        assert spec.moe is not None
        moe = spec.moe
        self.layers = [index for index in groups.mesh.layers(spec.num_layers) if moe.layers[index]]
        """The numbers of this stage's layers with experts."""
        self.num_experts = moe.num_experts
        self.trace = ExpertTrace(
            num_layers=len(self.layers),
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            device=part.device,
            keeps_ids=options.keeps_ids,
        )
        self.tp: TensorParallelGroup = groups.tp
        self.group: ExpertGroup = groups.experts
        # A group that is formed in epochs may have a single rank for a while.
        self.is_divided = options.dispatch is not None and (self.group.size > 1 or self.group.spans_engines)
        """Whether ranks have whole experts."""
        self.dispatcher: TokenDispatcher | None = None
        self.sequence_parallel: SequenceParallel | None = None
        if self.is_divided and options.dispatch != "all-reduce":
            kind = AllToAllTokenDispatcher if options.dispatch == "all-to-all" else AllGatherTokenDispatcher
            self.dispatcher = kind(self.group)
            if self.tp.size > 1:
                self.sequence_parallel = SequenceParallel(part.kernels, self.tp, spec.hidden_size)
        self.spans_engines = self.dispatcher is not None and self.group.spans_engines
        self.token_counts = [0] * self.group.size
        """Tokens of each rank of `group` in this step; changed in place."""
        self._num_redundant = options.num_redundant
        self._slots: list[LayerExpertSlots] = []
        if self.is_divided:
            per_rank = self.slots_per_rank(self.group.size)
            self.set_slots([initial_slots(moe.num_experts, per_rank * self.group.size)] * len(self.layers))
        if options.gets_experts:
            for slots in self._slots:
                slots.local_experts = [ABSENT] * slots.slots_per_rank

    def moe_index(self, index: int) -> int:
        """Return the index in `layers` of the layer `index`."""
        return self.layers.index(index)

    def slots_per_rank(self, num_ranks: int) -> int:
        """Return the number of expert slots of each rank, if `num_ranks` ranks have all experts and the redundant ones.
        It is rounded up. A rank has no expert twice."""
        return min(-(-(self.num_experts + self._num_redundant) // num_ranks), self.num_experts)

    def set_slots(self, slots: Sequence[Slots]) -> None:
        """Set the experts in the slots of all ranks of the group, [num_slots] for each layer."""
        rank, num_ranks = self.group.rank, self.group.size
        self._slots = [
            LayerExpertSlots(experts, num_experts=self.num_experts, rank=rank, num_ranks=num_ranks) for experts in slots
        ]
        self.token_counts[:] = [0] * num_ranks

    def slots(self, index: int) -> LayerExpertSlots | None:
        """Return the expert slots of the layer `index`, or None if every rank has a shard of every expert."""
        return self._slots[self.moe_index(index)] if self.is_divided else None

    def set_num_tokens(self, num_tokens: int) -> None:
        """Set the number of tokens of the next step. If the group spans engines, `agree` has set it."""
        if not self.spans_engines:
            self.token_counts[:] = token_counts(num_tokens, self.group.size)

    def agree(self, is_idle: bool, num_tokens: int) -> bool:
        """Begin a step on all ranks of several engines, and return whether any engine is busy in it."""
        own = num_tokens
        if self.sequence_parallel is not None:
            own = token_counts(num_tokens, self.tp.size)[self.tp.rank]
        any_engine_busy, self.token_counts[:] = self.group.agree(is_idle=is_idle, num_tokens=own)
        return any_engine_busy
