"""Low-rank adapters on a GPU: their memory, and the launches of products that have some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eagleray.kernels.adapters import AdapterSite, AdapterTable, LowRankFactors
from eagleray.kernels.cuda.adapter_tiles import AdapterTiles, max_tiles, tile_size
from eagleray.kernels.cuda.launch import Frame, TensorSpec
from eagleray.kernels.cuda.linear import CudaLinear
from eagleray.kernels.cuda.metadata import MetadataSizes
from eagleray.kernels.cuda.triton.adapters import MAX_LAYERS, expand, inner_shape, round_up, shrink
from eagleray.kernels.cuda.triton.gate import gate
from eagleray.kernels.recording import LinearOp, Value
from eagleray.kernels.storage import memory_of

RANK_GRAIN = 8
"""Rows of B are padded to a multiple of this many ranks: 16 bytes of bfloat16, which a thread reads at a time."""


class CudaAdapterSite(AdapterSite):
    """See `AdapterSite`. Writes are ordered behind the passes that were launched before them."""

    def __init__(self, table: AdapterTable, in_features: int, out_features: Sequence[int]) -> None:
        super().__init__(table, in_features, out_features)
        num_layers = len(out_features)
        assert num_layers <= MAX_LAYERS
        rank_stride = round_up(table.max_rank, RANK_GRAIN)
        zeros, num_slots = partial(torch.zeros, device=table.device), table.num_slots
        self._a = zeros(num_slots, num_layers, table.max_rank, in_features, dtype=table.dtype)
        self._b = zeros(num_slots, sum(out_features), rank_stride, dtype=table.dtype)
        self._ranks = zeros(num_slots, num_layers, dtype=torch.int32)
        """Rank of the adapter of each layer; 0: none. No kernel reads more of the factors."""
        self._scales = zeros(num_slots, num_layers, dtype=torch.float32)

    def clear(self, slot: int) -> None:
        self._ranks[slot] = 0

    def storage(self) -> list[Tensor]:
        return memory_of(self._a, self._b)

    def inner_spec(self, sizes: MetadataSizes) -> TensorSpec:
        """Return the working memory of `add_to`."""
        num_places = max_tiles(sizes.num_tokens, sizes.num_adapter_slots) * tile_size(sizes.num_tokens)
        shape = inner_shape(self.table.max_rank, self.in_features, len(self.out_features), self.table.dtype)
        return TensorSpec((num_places, *shape), torch.float32)

    def add_to(self, y: Tensor, x: Tensor, tiles: AdapterTiles, inner: Tensor) -> None:
        """Add the adapters of the tokens in tiles to a product `y` [num_tokens, sum of `out_features`] of `x`
        [num_tokens, in_features]."""
        shrink(x, self._a, self._ranks, tiles, out=inner)
        expand(inner, self._b, self._ranks, self._scales, tiles, self.out_features, out=y)

    def _write(self, slot: int, layer: int, factors: LowRankFactors) -> None:
        rank, first = len(factors.a), sum(self.out_features[:layer])
        self._a[slot, layer, :rank].copy_(factors.a)
        self._b[slot, first : first + self.out_features[layer], :rank].copy_(factors.b)
        self._ranks[slot, layer], self._scales[slot, layer] = rank, factors.scale


@dataclass(frozen=True, slots=True)
class AdaptedProduct:
    """The launches of a product with adapters. In a batch that has none they are those of the product alone."""

    op: LinearOp
    weight: CudaLinear
    site: CudaAdapterSite
    product: Value
    """The result before the gate; `op.out` if there is no gate."""

    @classmethod
    def of(cls, op: LinearOp, weight: CudaLinear, site: CudaAdapterSite) -> AdaptedProduct:
        assert not weight.is_float32 and not op.out.is_sequence_sharded, "tiles have tokens of the whole batch"
        product = op.out.another(2 * op.out.size, is_float32=False) if weight.is_gated else op.out
        return cls(op, weight, site, product)

    @property
    def writes(self) -> Sequence[Value]:
        return (self.product, self.op.out) if self.weight.is_gated else (self.op.out,)

    def scratch(self, sizes: MetadataSizes) -> Sequence[TensorSpec]:
        return [self.site.inner_spec(sizes)] if sizes.num_adapter_slots else []

    def compute(self, frame: Frame, *scratch: Tensor) -> None:
        x, out, tiles = frame[self.op.x], frame[self.op.out], frame.metadata.adapter_tiles
        if tiles is None and self.weight.applies_gate:
            self.weight.multiply(x, out)
            return
        product = frame[self.product]
        self.weight.multiply_without_gate(x, product)
        if tiles is not None:
            (inner,) = scratch
            self.site.add_to(product, x, tiles, inner)
        if self.weight.is_gated:
            gate(product, self.weight.clamp, out=out)
