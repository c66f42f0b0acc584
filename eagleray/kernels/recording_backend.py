"""The part of a backend that records a forward pass and runs it as a program, the same for every device.

A backend of this kind has its own layout of weights and its own lowering of a recording; see `Recording`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from eagleray.kernels.adapters import AdapterSite
from eagleray.kernels.backend import (
    SINGLE_RANK,
    Attend,
    AttendLatents,
    Compute,
    ComputeExperts,
    ExpertProducts,
    Forward,
    KernelBackend,
    Operation,
    OperationWithWeights,
)
from eagleray.kernels.decode_table import DecodeTable
from eagleray.kernels.expert_slots import ExpertSlotMap
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import ForwardBatch, Int32Array, PassLimits
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.params import AttentionParams, ClampedSwiglu, MLAParams, RouterParams
from eagleray.kernels.quantized import LoadedWeight, Weight
from eagleray.kernels.recording import (
    AddOp,
    AllReduceOp,
    AttentionOp,
    EmbeddingTable,
    EmbedOp,
    ExpertsOp,
    HostOp,
    LinearOp,
    LinearWeight,
    MLAAttentionOp,
    MLAWeights,
    NormOp,
    Recording,
    TokenIds,
    Value,
)
from eagleray.kernels.rope import Rope
from eagleray.kernels.storage import FunctionWithWeights, memory_of
from eagleray.parallel.group import TensorParallelGroup


class Program(Protocol):
    """A lowered recording, ready to run."""

    def num_bytes(self, limits: PassLimits) -> int:
        """Return the memory that the program takes for batches within `limits`. Temporary tensors of Python functions
        come on top."""
        ...

    def reserve(self, limits: PassLimits) -> None:
        """Allocate the memory for batches within `limits`, so that none of them makes it grow."""
        ...

    def warm_up(self, limits: PassLimits, last_tokens: Tensor | None) -> None:
        """See `Forward.warm_up`."""
        ...

    def run(self, x: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Compute a batch, from the hidden states `x` if the pass begins with them. Returns [num_tokens, features],
        which the next run may overwrite."""
        ...

    def decode(self, rows: Sequence[int], head: LinearWeight, table: DecodeTable) -> list[int] | None:
        """See `Forward.decode`."""
        return None


class RecordedLinear:
    """A product as an `Operation`. Called with a tensor it computes at once."""

    def __init__(self, weight: LinearWeight, adapters: AdapterSite | None = None) -> None:
        self.weight = weight
        self._adapters = adapters

    def storage(self) -> list[Tensor]:
        return self.weight.storage()

    def __call__(self, x: Value | Tensor) -> Value | Tensor:
        if isinstance(x, Tensor):
            assert self._adapters is None, "adapters are added within a pass"
            return self.weight(x)
        recording, weight = x.recording, self.weight
        x = recording.rounded(x)
        out = x.another(weight.size, is_float32=weight.is_float32)
        return recording.append(LinearOp(x=x, weight=weight, adapters=self._adapters, out=out))


class RecordingBackend(KernelBackend):
    """See `KernelBackend`, which documents the methods that layers call. `dtype` is that of the model."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def pack_linear(self, weight: LoadedWeight, bias: Tensor | None) -> LinearWeight:
        """Make the weight of a `linear`."""

    @abstractmethod
    def pack_exact_linear(self, weight: Tensor) -> LinearWeight:
        """Make the weight of an `exact_linear`."""

    @abstractmethod
    def pack_gated_linear(self, weight: LoadedWeight, bias: Tensor | None, clamp: ClampedSwiglu | None) -> LinearWeight:
        """Make the weight of a `gated_linear`."""

    @abstractmethod
    def pack_embedding(self, weight: Tensor, first: int) -> EmbeddingTable:
        """Make the table of an `embedding`."""

    @abstractmethod
    def pack_tied_embedding(self, weight: Weight, first: int) -> tuple[EmbeddingTable, LinearWeight]:
        """Make the table and the weight of a `tied_embedding`."""

    def pack_mla(self, params: MLAParams) -> MLAWeights:
        """Make the weights of an `mla_attention`."""
        return params

    @abstractmethod
    def pack_experts(self, gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight]) -> ExpertProducts:
        """Make the products of experts. The weights may come a second time, for other products of the same experts."""

    @abstractmethod
    def lower(
        self, recording: Recording, *, rope: Rope, device: torch.device, tp: TensorParallelGroup, block_size: int
    ) -> Program:
        """Make the program of a finished recording. `block_size`: that of the cache; for the other parameters see
        `compile`."""

    def linear(self, weight: LoadedWeight, bias: Tensor | None) -> RecordedLinear:
        return RecordedLinear(self.pack_linear(weight, bias))

    def exact_linear(self, weight: Tensor) -> RecordedLinear:
        return RecordedLinear(self.pack_exact_linear(weight))

    def gated_linear(
        self, weight: LoadedWeight, bias: Tensor | None, clamp: ClampedSwiglu | None = None
    ) -> RecordedLinear:
        return RecordedLinear(self.pack_gated_linear(weight, bias, clamp))

    def adapt(self, product: OperationWithWeights, site: AdapterSite) -> RecordedLinear:
        assert isinstance(product, RecordedLinear)
        return RecordedLinear(product.weight, site)

    def norm(self, weight: Tensor, eps: float) -> OperationWithWeights:
        kept = weight.float().contiguous()

        def apply(x: Value) -> Value:
            return x.recording.append(NormOp(x=x, weight=kept, eps=eps, out=x.another(x.size, is_float32=False)))

        return FunctionWithWeights(apply, memory_of(kept))

    def embedding(self, weight: Tensor, first: int) -> OperationWithWeights:
        return _embedding(self.pack_embedding(weight, first))

    def tied_embedding(self, weight: Weight, first: int) -> tuple[OperationWithWeights, RecordedLinear]:
        table, product = self.pack_tied_embedding(weight, first)
        return _embedding(table), RecordedLinear(product)

    def self_attention(self, params: AttentionParams) -> Attend:
        kept = replace(
            params, q_norm=_float32(params.q_norm), k_norm=_float32(params.k_norm), sinks=_float32(params.sinks)
        )

        def apply(qkv: Value, cache: Tensor, block_size: int) -> Value:
            out = qkv.another(params.num_heads * params.head_dim, is_float32=False)
            return qkv.recording.append(AttentionOp(qkv=qkv, params=kept, cache=cache, block_size=block_size, out=out))

        return FunctionWithWeights(apply, kept.storage())

    def mla_attention(self, params: MLAParams) -> AttendLatents:
        weights = self.pack_mla(params)

        def apply(queries: Value, latents: Value, cache: Tensor, block_size: int) -> Value:
            out = queries.another(weights.num_heads * weights.value_dim, is_float32=False)
            return queries.recording.append(
                MLAAttentionOp(
                    queries=queries, latents=latents, weights=weights, cache=cache, block_size=block_size, out=out
                )
            )

        return FunctionWithWeights(apply, weights.storage())

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
        products = self.expert_products(gate_up, down)

        def apply(x: Value, scores: Value) -> Value:
            assert slots is not None or scores.size == products.num_slots
            x = x.recording.rounded(x)
            return x.recording.append(
                ExpertsOp(
                    x=x,
                    scores=scores,
                    products=products,
                    router=router,
                    slots=slots,
                    trace=trace,
                    layer=layer,
                    out=x.another(x.size, is_float32=True),
                )
            )

        return FunctionWithWeights(apply, router.storage())

    def expert_products(
        self, gate_up: Sequence[OperationWithWeights], down: Sequence[OperationWithWeights]
    ) -> ExpertProducts:
        return self.pack_experts(_weights(gate_up), _weights(down))

    def host(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Value],
        *,
        size: int,
        is_sequence_sharded: bool | None = None,
    ) -> Value:
        if is_sequence_sharded is None:
            is_sequence_sharded = inputs[0].is_sequence_sharded
            is_alike = all(value.is_sequence_sharded == is_sequence_sharded for value in inputs)
            assert is_alike, "`is_sequence_sharded` is required for mixed inputs"
        recording = inputs[0].recording
        out = Value(recording, size, is_float32=True, is_sequence_sharded=is_sequence_sharded)
        return recording.append(HostOp(inputs=inputs, function=function, out=out))

    def add(self, a: Value, b: Value) -> Value:
        return a.recording.append(AddOp(total=a, x=b, out=a.another(a.size, is_float32=a.is_float32)))

    def all_reduce(self, x: Value, group: TensorParallelGroup) -> Value:
        if group.size == 1:
            return x
        return x.recording.append(AllReduceOp(x=x, group=group, out=x.another(x.size, is_float32=x.is_float32)))

    def compile(
        self,
        compute: Compute,
        *,
        rope: Rope,
        windows: frozenset[int | None],
        device: torch.device,
        tp: TensorParallelGroup = SINGLE_RANK,
    ) -> Forward:
        return RecordedForward(self, compute, rope=rope, device=device, tp=tp)

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32


class RecordedForward(Forward):
    """See `Forward`. The pass is recorded and lowered at the first call, and again for another cache, because its
    operations hold the cache's tensors."""

    def __init__(
        self, backend: RecordingBackend, compute: Compute, *, rope: Rope, device: torch.device, tp: TensorParallelGroup
    ) -> None:
        self._backend = backend
        self._compute = compute
        self._rope = rope
        self._device = device
        self._tp = tp
        self._cache: KVCache | None = None
        self._program: Program | None = None

    def __call__(self, x: Int32Array | Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        hidden = x if isinstance(x, Tensor) else None
        return self.program(cache, size=None if hidden is None else hidden.shape[1]).run(hidden, batch)

    def decode(self, rows: Sequence[int], cache: KVCache, head: Operation, table: DecodeTable) -> list[int] | None:
        assert isinstance(head, RecordedLinear)
        return self.program(cache, size=None).decode(rows, head.weight, table)

    def num_bytes(self, cache: KVCache, limits: PassLimits, *, size: int | None) -> int | None:
        return self.program(cache, size=size).num_bytes(limits)

    def reserve(self, cache: KVCache, limits: PassLimits, *, size: int | None) -> None:
        self.program(cache, size=size).reserve(limits)

    def warm_up(self, cache: KVCache, limits: PassLimits, *, size: int | None, last_tokens: Tensor | None) -> None:
        self.program(cache, size=size).warm_up(limits, last_tokens)

    def release(self) -> None:
        self._program = self._cache = None

    def program(self, cache: KVCache, *, size: int | None) -> Program:
        """Return the program for this cache. `size`: features of the hidden states that the pass begins with, None if
        it begins with token ids."""
        if self._program is None or cache is not self._cache:
            self._program, self._cache = None, cache  # the memory of another program is freed first
            self._program = self._backend.lower(
                self._record(size, cache),
                rope=self._rope,
                device=self._device,
                tp=self._tp,
                block_size=cache.block_size,
            )
        return self._program

    def _record(self, size: int | None, cache: KVCache) -> Recording:
        recording = Recording(self._backend.dtype)
        recording.finish(self._compute(recording.begin(size), cache.layers, cache.block_size))
        return recording


def _embedding(table: EmbeddingTable) -> OperationWithWeights:
    def apply(token_ids: TokenIds) -> Value:
        recording = token_ids.recording
        return recording.append(EmbedOp(table=table, out=Value(recording, table.size, is_float32=True)))

    return FunctionWithWeights(apply, table.storage())


def _weights(operations: Sequence[OperationWithWeights]) -> list[LinearWeight]:
    assert all(isinstance(operation, RecordedLinear) for operation in operations)
    return [operation.weight for operation in operations if isinstance(operation, RecordedLinear)]


def _float32(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.float().contiguous()
