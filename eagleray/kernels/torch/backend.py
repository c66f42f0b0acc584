"""The operations of the layers in plain torch. They define what every faster kernel must compute.

A layer asks for its operations when it is made, handing over its weights, and applies them to rows: [num_tokens,
features], tensors here. Other kernels may record what is applied and compute all of it at once (`native.py`), so layers
do nothing to rows but apply operations.

Run on tensors of any device. Numbers: bfloat16 and float16 are rounded where transformers rounds them, or less often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.expert_slots import ExpertSlotMap
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import ForwardBatch, Int32Array
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.ranking import Ranking
from eagleray.kernels.torch.activation import ClampedSwiglu, clamped_swiglu
from eagleray.kernels.torch.attention import AttentionMetadata, DeviceBatch, attend, build_attention_metadata
from eagleray.kernels.torch.context import ForwardContext
from eagleray.kernels.torch.experts import ExpertProducts, TorchProducts, compute_experts
from eagleray.kernels.torch.linear import GatedLinear, PlainLinear, StoredGatedLinear
from eagleray.kernels.torch.mla import MLAParams, latent_attention
from eagleray.kernels.torch.routing import RouterParams, route
from eagleray.models.layers.rope import Rope
from eagleray.parallel.group import SingleRankGroup, TensorParallelGroup

SINGLE_RANK = SingleRankGroup()

HiddenStates = Any
"""[num_tokens, features]: a tensor, or what stands for one while a forward pass is recorded."""

Operation = Callable[[HiddenStates], HiddenStates]

Context = Any
"""What the operations need to know of a batch."""

Compute = Callable[[HiddenStates, Sequence[Tensor], Context], HiddenStates]
"""The part of the model that a rank has: token ids or rows, the cache of each layer, context -> rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """The attention of a layer, of this rank's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """A position sees this many, itself included."""
    q_norm: Tensor | None
    k_norm: Tensor | None
    """[head_dim] weights of the norm of each query's and each key's heads, if there is one."""
    norm_eps: float
    sinks: Tensor | None = None
    """[num_heads] a score that each head gives to no key, beside those of the keys: a part of its probabilities."""


class Forward(Protocol):
    """The compiled form of a `Compute`."""

    def __call__(self, x: Int32Array | Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """x: token ids [num_tokens], or the rows that the stage before has sent."""
        ...


class TorchBackend:
    """Chosen once for a device when a model is loaded; a device's own class overrides what it does better.

    `is_invariant`: no number of a row depends on the other rows of a batch, or on how many threads there are.

    Methods that make an operation take over the weights: they may be kept in another layout, and only in that one.
    """

    is_batch_invariant = False

    def linear(self, weight: Tensor, bias: Tensor | None) -> Operation:
        """Products with a weight [out_features, in_features]."""
        return PlainLinear(weight, bias)

    def exact_linear(self, weight: Tensor) -> Operation:
        """Products in float32, whatever the model's dtype, with a weight [out_features, in_features] of that dtype."""
        product = self.linear(weight.float(), None)
        return lambda x: product(x.float())

    def gated_linear(self, weight: Tensor, bias: Tensor | None, clamp: ClampedSwiglu | None = None) -> Operation:
        """silu of the first half of the products with a weight [2 * size, in_features], times the second half; or what
        `clamp` makes of both."""
        product = self.linear(weight, bias)
        gate = self.silu_and_mul if clamp is None else partial(clamped_swiglu, clamp=clamp)
        if isinstance(product, PlainLinear):
            return StoredGatedLinear(product, gate)
        return GatedLinear(product, gate)

    def norm(self, weight: Tensor, eps: float) -> Operation:
        """RMS norm of each row."""
        return lambda x: self.rms_norm(x, weight, eps)

    def embedding(self, weight: Tensor, first: int) -> Operation:
        """Token ids to rows of `weight` [num_own, size], which are those of the tokens from number `first` on; zeros
        for other tokens."""
        return lambda token_ids: _embed(token_ids, weight, first)

    def tied_embedding(self, weight: Tensor, first: int) -> tuple[Operation, Operation]:
        """`embedding` and `linear` with the same weight."""
        return self.embedding(weight, first), self.linear(weight, None)

    def self_attention(self, heads: AttentionParams) -> Callable[[HiddenStates, Tensor, Context], HiddenStates]:
        """The products of a layer's queries, keys and values [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim],
        the layer's cache, context -> what each query sees [num_tokens, num_heads * head_dim]. Caches keys and values.
        """
        return _SelfAttention(heads, self)

    def latent_attention(
        self, heads: MLAParams
    ) -> Callable[[HiddenStates, HiddenStates, Tensor, Context], HiddenStates]:
        """The products of a layer's queries [num_tokens, num_heads * (plain_dim + rotated_dim)] and of its latents
        [num_tokens, rank + rotated_dim], the layer's cache, context -> what each query sees [num_tokens, num_heads *
        value_dim]. Caches the latents."""
        return latent_attention(heads, self)

    def experts(
        self,
        mixture: RouterParams,
        gate_up: Sequence[Operation],
        down: Sequence[Operation],
        *,
        slots: ExpertSlotMap | None = None,
        trace: ExpertTrace | None = None,
        layer: int = 0,
    ) -> Callable[[HiddenStates, HiddenStates], HiddenStates]:
        """Rows and the router's scores [num_tokens, num_experts] -> the weighted sum of what each row's experts
        compute; `gate_up` (gated) and `down` are indexed by expert, or by slot.

        `slots`: of the experts, only those in this rank's slots compute; a row takes of an expert with copies that with
        the number row % copies. `trace` is told what was chosen, as that of its layer `layer`.
        """

        def compute(x: Tensor, scores: Tensor) -> Tensor:
            ids, weights = self.route(scores, mixture)
            if trace is not None:
                trace.note(layer, ids)
            return compute_experts(x, ids if slots is None else slots.find(ids), weights, gate_up, down)

        return compute

    def expert_products(self, gate_up: Sequence[Operation], down: Sequence[Operation]) -> ExpertProducts:
        """The experts in this rank's slots, for code that routes and sums up itself, in a step of `host`."""
        return TorchProducts(gate_up, down)

    def host(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[HiddenStates],
        *,
        size: int,
        is_sequence_sharded: bool | None = None,
    ) -> HiddenStates:
        """What Python makes of rows, between operations: `function(*tensors) -> tensor`, [rows, features] each, `size`
        features in the end. It may see the numbers of rows of a pass in its tensors only, which may be 0.

        `is_sequence_sharded`: whether it returns the features of the rank's tokens alone (`token_shard`), as under
        sequence parallelism, and not those of all tokens; None: as its inputs are.
        """
        return function(*inputs)

    def add(self, a: HiddenStates, b: HiddenStates) -> HiddenStates:
        """The sum; `a` is not to be used any more."""
        return a + b

    def all_reduce(self, x: HiddenStates, group: TensorParallelGroup) -> HiddenStates:
        """The sum over the ranks; `x` is not to be used any more."""
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
        """Make a forward pass of `compute`, also for batches of no tokens. What it returns may be overwritten by the
        next pass. `tp`: the ranks that share the rows, where some are those of a share (see `host`)."""

        def forward(x: Int32Array | Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
            tensors = DeviceBatch.of(batch, device)
            cos, sin = rope.angles(tensors.positions)
            plans = {window: self.plan_attention(tensors, cache.layers[0], window) for window in windows}
            context = ForwardContext(cos=cos, sin=sin, slots=tensors.slots, plans=plans)
            rows: Tensor = compute(x if isinstance(x, Tensor) else tensors.token_ids, cache.layers, context)
            return rows

        return forward

    @property
    def ranking(self) -> Ranking:
        """What finds the highest logits."""
        return Ranking()

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the rows that go from stage to stage, in a model of that dtype."""
        return dtype

    def cache_block(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of a block in the cache of a layer."""
        return block_size, 2 * num_kv_heads, head_dim

    def latent_cache_block(self, block_size: int, size: int) -> tuple[int, ...]:
        """Shape of a block in the cache of a layer that caches latents, `size` features of each token."""
        return block_size, size

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) over the last dimension, in float32, times `weight` (broadcast from the right)."""
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * size]: silu of the first half, times the second half -> [n, size]"""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Rotate heads by position: x, out [num_tokens, heads, head_dim] (may be the same); cos, sin
        [num_tokens, 1, head_dim], where the first half of `sin` is negated."""
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        torch.mul(x, cos, out=out).addcmul_(swapped, sin)

    def write_cache(self, keys_values: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Put keys and values [num_tokens, 2 * num_kv_heads, head_dim] into their slots of a layer's cache."""
        if keys_values.dtype == torch.float16:
            # an overflow must stay its own request's: other rows read this block as padding, and 0 x inf is NaN
            keys_values = keys_values.nan_to_num()
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, keys_values)

    def plan_attention(self, batch: DeviceBatch, cache: Tensor, window: int | None) -> AttentionMetadata:
        """What all layers with this window share in one batch; `cache` is that of any layer."""
        return build_attention_metadata(batch, cache, window)

    def attention(
        self, queries: Tensor, keys_values: Tensor, cache: Tensor, plan: AttentionMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of queries [num_tokens, num_heads, head_dim] over their rows' cached context, to which
        `keys_values` (as in `write_cache`) have been written already -> [num_tokens, num_heads * head_dim]. `sinks`:
        see `AttentionParams`."""
        return attend(queries, keys_values, cache, plan, sinks)

    def route(self, scores: Tensor, mixture: RouterParams) -> tuple[Tensor, Tensor]:
        """[num_tokens, num_experts] -> ids and weights of the experts of each token, [num_tokens, top_k] each, the
        likeliest first. Ids are integers; weights are float32, also if they are rounded, or of the scores' dtype."""
        return route(scores, mixture)


class _SelfAttention:
    def __init__(self, heads: AttentionParams, kernels: TorchBackend) -> None:
        self._heads = heads
        self._kernels = kernels
        self._qk_norm = None
        if heads.q_norm is not None and heads.k_norm is not None:
            weights = [heads.q_norm] * heads.num_heads + [heads.k_norm] * heads.num_kv_heads
            self._qk_norm = torch.stack(weights)  # [heads of queries and keys, head_dim]

    def __call__(self, qkv: Tensor, cache: Tensor, context: ForwardContext) -> Tensor:
        heads = self._heads
        split = qkv.unflatten(1, (-1, heads.head_dim))  # [num_tokens, heads of q, k and v, head_dim]
        queries_keys = split[:, : heads.num_heads + heads.num_kv_heads]
        normed = queries_keys
        if self._qk_norm is not None:
            normed = self._kernels.rms_norm(queries_keys, self._qk_norm, heads.norm_eps)
        self._kernels.rotate(normed, context.cos, context.sin, out=queries_keys)
        queries, keys_values = split[:, : heads.num_heads], split[:, heads.num_heads :]
        self._kernels.write_cache(keys_values, cache, context.slots)
        return self._kernels.attention(queries, keys_values, cache, context.plans[heads.window], heads.sinks)


def _embed(token_ids: Tensor, weight: Tensor, first: int) -> Tensor:
    own = token_ids - first
    is_others = (own < 0) | (own >= len(weight))
    return F.embedding(own.masked_fill_(is_others, 0), weight).masked_fill_(is_others[:, None], 0)
