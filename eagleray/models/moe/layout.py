"""How the experts of a model are computed on this rank: which of them it has, how tokens come to the others', and what
is counted. The layers with experts have it in common; it is made before them.

Without expert parallelism a rank has its share of the inner features of every expert. With it, it has whole experts in
its slots (`slots.py`), and there are two ways to use them. Either every rank of the engine has all tokens, computes the
pairs of a token and an expert that are its own, and the sums of all ranks are added up (`dispatch` is None). Or each
rank has rows of its own, of its engine's batch or, if the engine has several tensor-parallel ranks, of its share of it
(`sequence_parallel`), and `dispatch` brings rows to experts and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.expert_slots import LayerExpertSlots
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.moe.expert_placement import initial
from eagleray.models.moe.token_dispatcher import AllGatherTokenDispatcher, AllToAllTokenDispatcher, TokenDispatcher
from eagleray.models.spec import ModelSpec
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.groups import Groups
from eagleray.parallel.token_shards import token_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """What the user asked for."""

    dispatch: Literal["all-reduce", "all-gather", "all-to-all"] | None = None
    """None: no expert parallelism."""
    num_redundant: int = 0
    """Slots beyond one for each expert, in all."""
    balance_interval: int | None = None
    """Steps after which experts are moved if they are not balanced. None: they stay where they are."""
    keeps_ids: bool = False
    """Which experts computed each token may be asked for."""


class ExpertLayout:
    """`tp`: the ranks of the engine's stage; `group`: those that have the experts between them."""

    def __init__(
        self, spec: ModelSpec, options: ExpertOptions, *, groups: Groups, kernels: KernelBackend, device: torch.device
    ) -> None:
        assert spec.moe is not None
        moe = spec.moe
        self.layers = [index for index in groups.mesh.layers(spec.num_layers) if moe.layers[index]]
        """The numbers of this stage's layers with experts."""
        self.num_experts = moe.num_experts
        self.trace = ExpertTrace(
            num_layers=len(self.layers),
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            device=device,
            keeps_ids=options.keeps_ids,
        )
        self.tp: TensorParallelGroup = groups.tp
        self.group: ExpertGroup = groups.experts
        self.is_divided = options.dispatch is not None and self.group.size > 1
        """Into whole experts."""
        self.dispatch: TokenDispatcher | None = None
        self.sequence_parallel: SequenceParallel | None = None
        if self.is_divided and options.dispatch != "all-reduce":
            kind = AllToAllTokenDispatcher if options.dispatch == "all-to-all" else AllGatherTokenDispatcher
            self.dispatch = kind(self.group)
            if self.tp.size > 1:
                self.sequence_parallel = SequenceParallel(kernels, self.tp, spec.hidden_size)
        self.spans_engines = self.dispatch is not None and self.group.spans_engines
        self.row_counts = [0] * self.group.size
        """Of the step: rows of each rank of `group`. Changed in place."""
        self._slots: list[LayerExpertSlots] = []
        if self.is_divided:
            num_slots = moe.num_experts + options.num_redundant
            self._slots = [
                LayerExpertSlots(
                    initial(moe.num_experts, num_slots),
                    num_experts=moe.num_experts,
                    rank=self.group.rank,
                    num_ranks=self.group.size,
                )
                for _ in self.layers
            ]

    def number(self, index: int) -> int:
        """Which of `layers` the layer `index` is."""
        return self.layers.index(index)

    def slots(self, index: int) -> LayerExpertSlots | None:
        """Of the layer `index`. None: every expert is on every rank, cut."""
        return self._slots[self.number(index)] if self.is_divided else None

    def has_expert(self, index: int, expert: int) -> bool:
        """Whether this rank reads it from the checkpoint, whole or its share of it."""
        slots = self.slots(index)
        return slots is None or expert in slots.local_experts

    def set_num_tokens(self, num_tokens: int) -> None:
        """The next step has so many tokens. Of several engines, `agree` says it instead."""
        if not self.spans_engines:
            self.row_counts[:] = token_counts(num_tokens, self.group.size)

    def agree(self, is_idle: bool, num_tokens: int) -> bool:
        """All ranks of several engines begin a step: whether one of the engines works."""
        own = token_counts(num_tokens, self.tp.size)[self.tp.rank] if self.sequence_parallel is not None else num_tokens
        works, self.row_counts[:] = self.group.agree(is_idle=is_idle, num_tokens=own)
        return works
