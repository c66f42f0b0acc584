"""The token embedding, and the head that turns hidden states into logits; if they are tied they share a weight.

A tensor-parallel rank has the weight's rows of some tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.backend import HiddenStates, KernelBackend, Operation
from eagleray.kernels.grouped import GroupedWeight
from eagleray.kernels.quantized import Weight
from eagleray.models.layers.layer import Layer, WeightGroup
from eagleray.models.part import ModelPart
from eagleray.models.sharding import padded_shard
from eagleray.models.weights import Cut, Param, WeightRole, Weights

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class EmbeddingAndHead(Layer):
    """The embedding if this is the first stage, and the head if it is the last. A model that pools has no head."""

    def __init__(self, part: ModelPart) -> None:
        spec, mesh = part.spec, part.mesh
        own, has_head = padded_shard(spec.vocab_size, part.tp), mesh.is_last_stage and not spec.pools
        is_tied = spec.tie_embeddings
        self._part = part
        self._embedding: WeightGroup | None = None
        self._head: WeightGroup | None = None
        self._tied: WeightGroup | None = None
        self.head: Operation | None = None
        """Maps hidden states to the logits of this rank's tokens, once the last stage has loaded it. Every rank has
        the same number of tokens, so the last ones may be padding beyond the vocabulary."""
        if is_tied and mesh.is_first_stage and has_head:
            self._tied = _group(
                EMBEDDING, part, own, lambda rows, kernels: kernels.tied_embedding(rows, own.start), WeightRole.HEAD
            )
            return
        if mesh.is_first_stage:
            self._embedding = _group(EMBEDDING, part, own, _make_embedding(own.start))
        if has_head:
            name = EMBEDDING if is_tied else HEAD
            self._head = _group(name, part, own, lambda rows, kernels: kernels.linear(rows, None), WeightRole.HEAD)

    def names(self) -> Iterator[str]:
        yield EMBEDDING
        if not (self._part.spec.tie_embeddings or self._part.spec.pools):
            yield HEAD

    def embed(self, token_ids: HiddenStates) -> HiddenStates:
        """Map token ids to hidden states."""
        lookup: Operation | None = self._embedding if self._tied is None else self._tied.operation[0]
        assert lookup is not None, "only the first stage has the embedding"
        return self._part.kernels.all_reduce(lookup(token_ids), self._part.tp)

    def load(self, weights: Weights, kernels: KernelBackend) -> None:
        super().load(weights, kernels)
        loaded = self._head if self._tied is None else self._tied
        if loaded is not None:
            self.head = loaded.operation if self._tied is None else loaded.operation[1]


Make = Callable[[Weight, KernelBackend], Operation | tuple[Operation, ...]]


def _make_embedding(first: int) -> Make:
    def make(rows: Weight, kernels: KernelBackend) -> Operation:
        assert isinstance(rows, Tensor), "an embedding without a head is not quantized"
        return kernels.embedding(rows, first)

    return make


def _group(name: str, part: ModelPart, own: range, make: Make, role: WeightRole | None = None) -> WeightGroup:
    """Declare the rows `own` of the embedding or the head. Rows beyond the vocabulary are zeros. `role`: None if the
    weight is not quantized."""
    spec = part.spec
    present = range(min(own.start, spec.vocab_size), min(own.stop, spec.vocab_size))
    param = Param(name, (spec.vocab_size, spec.hidden_size), Cut(0, present))

    def make_padded(weights: Weights, kernels: KernelBackend) -> Operation | tuple[Operation, ...]:
        rows = weights.load(param) if role is None else weights.load_head(param)
        rows = _padded(rows, len(own) - len(present))
        return make(weights.quantize(rows, role) if role is not None and isinstance(rows, Tensor) else rows, kernels)

    return WeightGroup([param], make_padded)


def _padded(rows: Weight, count: int) -> Weight:
    """Return a weight with `count` rows of zeros below the others."""
    if count == 0:
        return rows
    if isinstance(rows, Tensor):
        return F.pad(rows, (0, 0, 0, count))
    assert isinstance(rows, GroupedWeight), "no other quantized weight is the head's before `quantize`"
    codes, scales, offsets = (
        None if part is None else F.pad(part, (0, 0, 0, count)) for part in (rows.codes, rows.scales, rows.offsets)
    )
    assert codes is not None and scales is not None
    return replace(rows, codes=codes, scales=scales, offsets=offsets)
