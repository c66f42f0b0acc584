"""The operations of the layers in plain torch, on any device. They define what every other backend computes.

bfloat16 and float16 numbers are rounded where transformers rounds them, or less often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.adapters import AdapterSite, AdapterTable
from eagleray.kernels.backend import (
    SINGLE_RANK,
    Attend,
    AttendLatents,
    Compute,
    ComputeExperts,
    ExpertProducts,
    Forward,
    HiddenStates,
    KernelBackend,
    OperationWithWeights,
)
from eagleray.kernels.expert_slots import ExpertSlotMap
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import ForwardBatch, Int32Array, PassLimits
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.params import AttentionParams, ClampedSwiglu, MLAParams, RouterParams
from eagleray.kernels.quantized import LoadedWeight, Weight, WeightFormat, unquantized
from eagleray.kernels.ranking import Ranking
from eagleray.kernels.rope import Rope
from eagleray.kernels.storage import FunctionWithWeights, memory_of
from eagleray.kernels.torch.adapters import TorchAdapterSite
from eagleray.kernels.torch.attention import DeviceBatch, ForwardContext, SelfAttention, build_attention_metadata
from eagleray.kernels.torch.experts import TorchProducts, compute_experts
from eagleray.kernels.torch.functional import clamped_swiglu, rms_norm, silu_and_mul
from eagleray.kernels.torch.linear import AdaptedLinear, GatedLinear, PlainLinear
from eagleray.kernels.torch.mla import LatentAttention, mla_cache_block
from eagleray.kernels.torch.routing import route
from eagleray.parallel.group import TensorParallelGroup


class TorchBackend(KernelBackend):
    """See `KernelBackend`, which documents the methods."""

    is_batch_invariant = False
    kept_formats: frozenset[WeightFormat] = frozenset()

    def linear(self, weight: LoadedWeight, bias: Tensor | None) -> OperationWithWeights:
        return PlainLinear(unquantized(weight), bias)

    def exact_linear(self, weight: Tensor) -> OperationWithWeights:
        product = self.linear(weight.float(), None)
        return FunctionWithWeights(lambda x: product(x.float()), product.storage())

    def gated_linear(
        self, weight: LoadedWeight, bias: Tensor | None, clamp: ClampedSwiglu | None = None
    ) -> OperationWithWeights:
        product = self.linear(weight, bias)
        gate = silu_and_mul if clamp is None else partial(clamped_swiglu, clamp=clamp)
        return GatedLinear(product, gate)

    def adapt(self, product: OperationWithWeights, site: AdapterSite) -> OperationWithWeights:
        assert isinstance(site, TorchAdapterSite)
        return product.adapted(site) if isinstance(product, GatedLinear) else AdaptedLinear(product, site)

    def norm(self, weight: Tensor, eps: float) -> OperationWithWeights:
        weight = weight.contiguous()
        return FunctionWithWeights(lambda x: rms_norm(x, weight, eps), memory_of(weight))

    def embedding(self, weight: Tensor, first: int) -> OperationWithWeights:
        weight = weight.contiguous()
        return FunctionWithWeights(lambda token_ids: _embed(token_ids, weight, first), memory_of(weight))

    def tied_embedding(self, weight: Weight, first: int) -> tuple[OperationWithWeights, OperationWithWeights]:
        plain = unquantized(weight).contiguous()
        return self.embedding(plain, first), self.linear(plain, None)

    def self_attention(self, params: AttentionParams) -> Attend:
        return SelfAttention(params)

    def mla_attention(self, params: MLAParams) -> AttendLatents:
        return LatentAttention(params)

    def experts(
        self,
        router: RouterParams,
        gate_up: Sequence[OperationWithWeights],
        down: Sequence[OperationWithWeights],
        *,
        slots: ExpertSlotMap | None = None,
        trace: ExpertTrace | None = None,
        layer: int = 0,
    ) -> ComputeExperts:
        def compute(x: Tensor, scores: Tensor) -> Tensor:
            ids, weights = route(scores, router)
            if trace is not None:
                trace.record(layer, ids)
            return compute_experts(x, ids if slots is None else slots.find(ids), weights, gate_up, down)

        return FunctionWithWeights(compute, router.storage())

    def expert_products(
        self, gate_up: Sequence[OperationWithWeights], down: Sequence[OperationWithWeights]
    ) -> ExpertProducts:
        return TorchProducts(gate_up, down)

    def route(self, scores: Tensor, router: RouterParams) -> tuple[Tensor, Tensor]:
        return route(scores, router)

    def host(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[HiddenStates],
        *,
        size: int,
        is_sequence_sharded: bool | None = None,
    ) -> HiddenStates:
        return function(*inputs)

    def add(self, a: HiddenStates, b: HiddenStates) -> HiddenStates:
        return a + b

    def all_reduce(self, x: HiddenStates, group: TensorParallelGroup) -> HiddenStates:
        return group.all_reduce(x)

    def compile(
        self,
        compute: Compute,
        *,
        rope: Rope,
        windows: frozenset[int | None],
        device: torch.device,
        tp: TensorParallelGroup = SINGLE_RANK,
    ) -> Forward:
        return TorchForward(compute, rope, windows, device)

    @property
    def ranking(self) -> Ranking:
        return Ranking()

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def adapter_site(self, table: AdapterTable, in_features: int, out_features: Sequence[int]) -> TorchAdapterSite:
        return TorchAdapterSite(table, in_features, out_features)

    def serves_cache(self, cache_dtype: torch.dtype, device: torch.device, *, of_latents: bool) -> bool:
        return False

    def cache_block(
        self, block_size: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype
    ) -> tuple[int, ...]:
        return block_size, 2 * num_kv_heads, head_dim

    def mla_cache_block(self, block_size: int, size: int) -> tuple[int, ...]:
        return mla_cache_block(block_size, size)


class TorchForward(Forward):
    """See `Forward`. It computes operation by operation, so there is nothing to warm up."""

    def __init__(self, compute: Compute, rope: Rope, windows: frozenset[int | None], device: torch.device) -> None:
        self._compute = compute
        self._rope = rope
        self._windows = windows
        self._device = device

    def __call__(self, x: Int32Array | Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        tensors = DeviceBatch.of(batch, self._device)
        cos, sin = self._rope.angles(tensors.positions)
        metadata = {window: build_attention_metadata(tensors, cache.layers[0], window) for window in self._windows}
        context = ForwardContext(cos=cos, sin=sin, slot_mapping=tensors.slot_mapping, metadata=metadata)
        hidden: Tensor = self._compute(x if isinstance(x, Tensor) else tensors.token_ids, cache.layers, context)
        return hidden

    def num_bytes(self, cache: KVCache, limits: PassLimits, *, size: int | None) -> int | None:
        return None

    def reserve(self, cache: KVCache, limits: PassLimits, *, size: int | None) -> None:
        pass

    def warm_up(self, cache: KVCache, limits: PassLimits, *, size: int | None, last_tokens: Tensor | None) -> None:
        pass

    def release(self) -> None:
        pass


def _embed(token_ids: Tensor, weight: Tensor, first: int) -> Tensor:
    own = token_ids - first
    is_others = (own < 0) | (own >= len(weight))
    return F.embedding(own.masked_fill_(is_others, 0), weight).masked_fill_(is_others[:, None], 0)
