"""The interface between a model's layers and the kernels of a device.

A layer asks the backend for its operations when it is made, handing over its weights, and applies them to hidden
states. A backend may record the operations and later run the whole pass at once, so layers do nothing to hidden states
but apply operations. `torch/backend.py` implements the interface in plain torch and defines the numbers: every other
backend computes the same, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from eagleray.kernels.adapters import AdapterSite, AdapterTable
from eagleray.kernels.decode_table import DecodeTable
from eagleray.kernels.expert_slots import ExpertSlotMap
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import ForwardBatch, Int32Array, PassLimits
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.params import AttentionParams, ClampedSwiglu, MLAParams, RouterParams
from eagleray.kernels.quantized import LoadedWeight, Weight, WeightFormat, quantize_fp8
from eagleray.kernels.ranking import Ranking
from eagleray.kernels.rope import Rope
from eagleray.parallel.group import SingleRankGroup, TensorParallelGroup

SINGLE_RANK = SingleRankGroup()

HiddenStates = Any
"""[num_tokens, features]: a tensor, or a placeholder for one while a forward pass is recorded."""

Operation = Callable[[HiddenStates], HiddenStates]

Context = Any
"""State of one batch that attention needs. Only the backend that made it looks inside."""

Compute = Callable[[HiddenStates, Sequence[Tensor], Context], HiddenStates]
"""The part of the model that a rank has: (token ids or hidden states, the cache of each layer, context) -> hidden
states"""


class OwnsWeights(Protocol):
    """An object that computes with weights of its own, in the layout of its backend."""

    def storage(self) -> list[Tensor]:
        """Return the memory of the weights: one-dimensional uint8 tensors in a fixed order.

        Two objects that a backend makes by the same call from weights of equal shapes, dtypes and formats have storage
        of equal sizes. So weights are updated by making an object of the new ones and copying its storage to that of
        the old object. The copy is allowed between passes. The next pass computes with the new numbers, also if it is
        recorded, or captured in a graph.

        The memory stays at its address as long as the object lives, except that `experts` and `expert_products` move
        that of their products when they are first called. The two results of `tied_embedding` may share their memory.
        """
        ...


class OperationWithWeights(OwnsWeights, Protocol):
    """An `Operation` that owns weights."""

    def __call__(self, x: HiddenStates, /) -> HiddenStates: ...


class Attend(OwnsWeights, Protocol):
    """An attention, see `KernelBackend.self_attention`. It owns the weights of its norms, and its sinks."""

    def __call__(self, qkv: HiddenStates, cache: Tensor, context: Context, /) -> HiddenStates:
        """Map queries, keys and values [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] to [num_tokens,
        num_heads * head_dim]. `cache` is the layer's."""
        ...


class AttendLatents(OwnsWeights, Protocol):
    """A multi-head latent attention, see `KernelBackend.mla_attention`. It owns the tensors of `MLAParams`."""

    def __call__(
        self, queries: HiddenStates, latents: HiddenStates, cache: Tensor, context: Context, /
    ) -> HiddenStates:
        """Map queries [num_tokens, num_heads * (plain_dim + rotated_dim)] and latents [num_tokens, rank + rotated_dim]
        to [num_tokens, num_heads * value_dim]. `cache` is the layer's."""
        ...


class ComputeExperts(OwnsWeights, Protocol):
    """The experts of a layer, see `KernelBackend.experts`. It owns the tensors of `RouterParams`; the weights of an
    expert belong to the products."""

    def __call__(self, x: HiddenStates, scores: HiddenStates, /) -> HiddenStates:
        """Map hidden states to hidden states, given the router's scores [num_tokens, num_experts]."""
        ...


class Forward(Protocol):
    """The compiled form of a `Compute`."""

    def __call__(self, x: Int32Array | Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return the hidden states of a batch, given its token ids [num_tokens], or the hidden states sent by the
        previous pipeline stage."""
        ...

    def decode(self, rows: Sequence[int], cache: KVCache, head: Operation, table: DecodeTable) -> list[int] | None:
        """Compute the last known token of each of `rows`, without duplicates, and append the next one to its row in
        `table`: the token of the highest logit, or a draw, the same to the last bit as by a pass, the
        head and a `Ranking`. Returns these tokens, -1 for a row without a finite highest logit, which gets token 0.
        Returns None, and changes nothing, if a row needs anything else or the backend cannot do it.
        """
        return None

    def num_bytes(self, cache: KVCache, limits: PassLimits, *, size: int | None) -> int | None:
        """Return the memory that batches within `limits` take, apart from temporary tensors of Python functions; None
        if every operation allocates its own. For `size` see `warm_up`."""
        ...

    def reserve(self, cache: KVCache, limits: PassLimits, *, size: int | None) -> None:
        """Allocate the memory for batches within `limits`."""
        ...

    def warm_up(self, cache: KVCache, limits: PassLimits, *, size: int | None, last_tokens: Tensor | None) -> None:
        """Do what would delay the first batches: compile kernels, allocate memory for batches within `limits`, capture
        graphs. `size`: the features of the hidden states sent by the previous stage, None on the first stage;
        `last_tokens`: the tensor that all batches will have."""
        ...

    def release(self) -> None:
        """Free the memory and the graphs that were made for batches. The next batch makes them again."""
        ...


class ExpertProducts(Protocol):
    """The experts in this rank's slots, for code that brings tokens and experts together itself."""

    num_slots: int

    def pairs(self, x: Tensor, slots: Tensor) -> Tensor:
        """Return float32 [n, k, hidden_size]: the output of the expert in each slot for each row, zeros where the slot
        is -1. `x` [n, hidden_size] is of the model's dtype, `slots` int32 [n, k]."""
        ...

    def sums(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Return float32 [n, hidden_size]: `pairs` times `weights` float32 [n, k], summed in order of k."""
        ...

    def weighted_sum(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return float32 [n, hidden_size]: `outputs` float32 [n, k, hidden_size] times `weights` float32 [n, k], summed
        in order of k as by `sums`."""
        ...

    def storage(self, slot: int) -> list[Tensor]:
        """Return the memory of the weights in a slot, of the same sizes for every slot: the storage of both products,
        see `OwnsWeights`."""
        ...


class WeightAllocator(Protocol):
    """Memory for packed weights."""

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return [num_elements] with any contents. May be called from any thread."""
        ...


class KernelUnavailable(Exception):
    """A kernel that a model needs cannot be compiled or launched on this machine."""


class KernelBackend(Protocol):
    """The operations of the layers on one kind of device, chosen once when a model is loaded.

    Methods that make an operation take ownership of the weights: a backend may keep them in another layout, and only in
    that one. `OwnsWeights.storage` gives access to it.
    """

    compiles_on_demand: bool = False
    """Whether kernels are compiled when they are first launched, which may fail."""
    is_batch_invariant: bool
    """Whether no number of a token depends on the other tokens of a batch or on the number of threads."""

    kept_formats: frozenset[WeightFormat]
    """The formats of quantized weights that `linear` and `gated_linear` take; other weights are decoded when they are
    loaded. The blocks of an `Fp8Weight` must have a multiple of `FP8_COLUMNS` columns, or all columns."""

    takes_parts: bool = False
    """Whether the weight of `linear` and `gated_linear` may be `RowParts`. Weights are copied in any case."""

    def with_memory(self, memory: WeightAllocator) -> KernelBackend:
        """Return a backend whose operations have the same storage. Weights that it packs into another layout are in
        pieces of `memory`; all other tensors are where this backend has them."""
        return self

    def linear(self, weight: LoadedWeight, bias: Tensor | None) -> OperationWithWeights:
        """Make a product with a weight [out_features, in_features]."""
        ...

    def exact_linear(self, weight: Tensor) -> OperationWithWeights:
        """Make a product that is computed in float32 although its weight [out_features, in_features] is of the model's
        dtype."""
        ...

    def gated_linear(
        self, weight: LoadedWeight, bias: Tensor | None, clamp: ClampedSwiglu | None = None
    ) -> OperationWithWeights:
        """Make a product with a weight [2 * size, in_features] whose first half of outputs gates the second half: silu
        of the first half times the second, or as `clamp` says."""
        ...

    def adapter_site(self, table: AdapterTable, in_features: int, out_features: Sequence[int]) -> AdapterSite:
        """Allocate the memory for the adapters of one product, in the layout that `adapt` needs."""
        ...

    def adapt(self, product: OperationWithWeights, site: AdapterSite) -> OperationWithWeights:
        """Return the product of a `linear` or `gated_linear` plus the low-rank adapters of the tokens that have one,
        before the gate if it is gated. Its storage is that of `product`; the adapters are in `site`."""
        ...

    def norm(self, weight: Tensor, eps: float) -> OperationWithWeights:
        """Make an RMS norm over the features of each token."""
        ...

    def embedding(self, weight: Tensor, first: int) -> OperationWithWeights:
        """Make a lookup of token ids in `weight` [num_own, size], which holds the vectors of the tokens from id `first`
        on; other tokens get zeros."""
        ...

    def quantizer(self, kind: WeightFormat, *, is_head: bool = False) -> Callable[[Tensor], Weight]:
        """Return the function that quantizes a weight [rows, columns] of the model's dtype to one of `kept_formats`,
        more finely if it `is_head`. It returns a weight that cannot be divided into groups as it is."""
        return quantize_fp8

    def tied_embedding(self, weight: Weight, first: int) -> tuple[OperationWithWeights, OperationWithWeights]:
        """Make an `embedding` and a `linear` that share one weight."""
        ...

    def self_attention(self, params: AttentionParams) -> Attend:
        """Make an attention that caches the batch's keys and values and computes what each query sees."""
        ...

    def mla_attention(self, params: MLAParams) -> AttendLatents:
        """Make a multi-head latent attention that caches the batch's latents and computes what each query sees."""
        ...

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
        """Make the choice of experts and the weighted sum of their outputs. `gate_up` (gated) and `down` are indexed by
        expert, or by expert slot if `slots` is given.

        `slots`: only experts in this rank's slots are computed; of an expert with copies, the token with number i takes
        copy i % copies. `trace` records the chosen experts under the number `layer`.
        """
        ...

    def expert_products(
        self, gate_up: Sequence[OperationWithWeights], down: Sequence[OperationWithWeights]
    ) -> ExpertProducts:
        """Return the experts in this rank's slots for code that routes and sums itself, within `host`."""
        ...

    def route(self, scores: Tensor, router: RouterParams) -> tuple[Tensor, Tensor]:
        """Return ids and weights, [num_tokens, top_k] each, of the experts of each token, the likeliest first. `scores`
        are [num_tokens, num_experts]; ids are integers; weights are float32 (also when rounded) or of the scores'
        dtype."""
        ...

    def host(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[HiddenStates],
        *,
        size: int,
        is_sequence_sharded: bool | None = None,
    ) -> HiddenStates:
        """Apply a Python function between operations: `function(*tensors)` of tensors [num_tokens, features] returns
        one tensor with `size` features. It may take the number of tokens, possibly 0, from its tensors only.

        `is_sequence_sharded`: whether the result has the tokens of this rank's shard (`token_shard`) and not those of
        the whole batch; None: the same as the inputs.
        """
        ...

    def add(self, a: HiddenStates, b: HiddenStates) -> HiddenStates:
        """Return the sum. `a` must not be used afterwards."""
        ...

    def all_reduce(self, x: HiddenStates, group: TensorParallelGroup) -> HiddenStates:
        """Return the sum over the ranks. `x` must not be used afterwards."""
        ...

    def compile(
        self,
        compute: Compute,
        *,
        rope: Rope,
        windows: frozenset[int | None],
        device: torch.device,
        tp: TensorParallelGroup = SINGLE_RANK,
    ) -> Forward:
        """Make a forward pass of `compute` for batches of any size, also of no tokens. The next pass may overwrite its
        result. `windows`: those of the layers. `tp`: the ranks that divide a batch's tokens where a value is
        sequence-sharded (see `host`)."""
        ...

    @property
    def ranking(self) -> Ranking:
        """Finds the highest logits of a row."""
        ...

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the hidden states that pipeline stages exchange in a model of `dtype`."""
        ...

    def cache_block(
        self, block_size: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype
    ) -> tuple[int, ...]:
        """Return the shape of a block of `block_size` tokens in a layer's cache of `cache_dtype`."""
        ...

    def mla_cache_block(self, block_size: int, size: int) -> tuple[int, ...]:
        """Return the shape of a block in a layer's cache of latents, `size` features for each token."""
        ...

    def serves_cache(self, cache_dtype: torch.dtype, device: torch.device, *, of_latents: bool) -> bool:
        """Whether the attention takes caches of int8 or float8_e4m3fn on this device."""
        ...
