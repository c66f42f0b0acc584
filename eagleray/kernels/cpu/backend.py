"""The backend of CPUs: a forward pass is recorded once and then run by one call of the C++ kernels in `csrc/`.

Hidden states are float32 between the layers in a model of any dtype; the inputs of products are rounded to that dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

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
)
from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.cpu.experts import (
    ExpertScratch,
    NativeProducts,
    c_router_params,
    c_slot_map,
    native_route,
)
from eagleray.kernels.cpu.huge_pages import WeightMemory
from eagleray.kernels.cpu.linear import NativeLinear
from eagleray.kernels.cpu.mla import NativeMLA
from eagleray.kernels.cpu.program import Program
from eagleray.kernels.cpu.ranking import NativeRanking
from eagleray.kernels.cpu.recording import Recording, Value
from eagleray.kernels.expert_slots import ExpertSlotMap
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import ForwardBatch, Int32Array
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.params import AttentionParams, ClampedSwiglu, MLAParams, RouterParams
from eagleray.kernels.ranking import Ranking
from eagleray.kernels.rope import Rope
from eagleray.kernels.torch.mla import mla_cache_block
from eagleray.parallel.group import TensorParallelGroup


class CpuBackend(KernelBackend):
    """See `KernelBackend`, which documents the methods. `library` is that of `native_library`; at most `num_threads`
    threads compute."""

    is_batch_invariant = True

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, *, num_threads: int) -> None:
        self.library = library
        self.dtype = dtype
        self.num_threads = num_threads
        self._kind = int(dtype == torch.bfloat16)
        self._memory = WeightMemory()
        self._scratch = ExpertScratch()
        self._latents = NativeMLA(self)
        self._has_latents = False

    @staticmethod
    def serves(dtype: torch.dtype, *, feature_sizes: Sequence[int], head_dim: int) -> bool:
        """Whether there are kernels for a model of this dtype. `feature_sizes`: see `ModelSpec.feature_sizes`."""
        is_even = all(size % 2 == 0 for size in feature_sizes)
        return dtype in (torch.float32, torch.bfloat16) and is_even and head_dim <= abi.MAX_HEAD_DIM

    def linear(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        n, k = weight.shape
        packed = self._memory.allocate(self.library.er_packed_size(n, k, self._kind), self.dtype)
        weight = weight.contiguous()
        self.library.er_pack(weight.data_ptr(), k, n, k, packed.data_ptr(), self._kind, 1)
        return self._linear(packed, bias, n=n, k=k, is_gated=False)

    def exact_linear(self, weight: Tensor) -> Operation:
        return self.linear(weight, None)  # it rounds nothing

    def gated_linear(self, weight: Tensor, bias: Tensor | None, clamp: ClampedSwiglu | None = None) -> NativeLinear:
        inner, k = weight.shape[0] // 2, weight.shape[1]
        padded = -(-inner // abi.NUM_LANES) * abi.NUM_LANES  # a panel holds equally many gates and gated outputs
        packed = self._memory.allocate(self.library.er_packed_size(2 * padded, k, self._kind), self.dtype)
        gate, up = weight.contiguous().chunk(2)
        self.library.er_pack_gate_up(gate.data_ptr(), up.data_ptr(), k, inner, k, packed.data_ptr(), self._kind, 1)
        return self._linear(packed, bias, n=2 * inner, k=k, is_gated=True, clamp=clamp)

    def _linear(
        self, packed: Tensor, bias: Tensor | None, *, n: int, k: int, is_gated: bool, clamp: ClampedSwiglu | None = None
    ) -> NativeLinear:
        threads = self.num_threads
        return NativeLinear(self.library, packed, bias, n=n, k=k, is_gated=is_gated, clamp=clamp, num_threads=threads)

    def norm(self, weight: Tensor, eps: float) -> Operation:
        kept = weight.float()

        def apply(x: Value) -> Value:
            out = x.another(x.size, is_float=False)
            args = abi.CNormalize(size=x.size, weight=kept.data_ptr(), eps=eps)
            x.recording.append(abi.OP_NORMALIZE, args, reads={"x": x}, writes={"out": out})
            return out

        return apply

    def embedding(self, weight: Tensor, first: int) -> Operation:
        return _embedding(weight, weight.shape[1], len(weight), first, is_packed=False)

    def tied_embedding(self, weight: Tensor, first: int) -> tuple[Operation, Operation]:
        product = self.linear(weight, None)
        return _embedding(product.packed, weight.shape[1], len(weight), first, is_packed=True), product

    def self_attention(self, params: AttentionParams) -> Attend:
        norms = [None if weight is None else weight.float() for weight in (params.q_norm, params.k_norm)]
        sinks = None if params.sinks is None else params.sinks.float()
        size = params.num_heads * params.head_dim

        def apply(qkv: Value, cache: Tensor, block_size: int) -> Value:
            recording = qkv.recording
            queries, out = recording.value(size, is_float=False), recording.value(size, is_float=False)
            attention = abi.CAttentionParams(
                num_heads=params.num_heads,
                num_kv_heads=params.num_kv_heads,
                head_dim=params.head_dim,
                block_size=block_size,
                window=params.window or 0,
                scale=params.head_dim**-0.5,
                sinks=None if sinks is None else sinks.data_ptr(),
            )
            q_norm, k_norm = (None if weight is None else weight.data_ptr() for weight in norms)
            eps, address = params.norm_eps, cache.data_ptr()
            args = abi.CAttend(params=attention, q_norm=q_norm, k_norm=k_norm, eps=eps, cache=address)
            recording.append(abi.OP_ATTEND, args, reads={"qkv": qkv}, writes={"queries": queries, "out": out})
            return out

        return apply

    def mla_attention(self, params: MLAParams) -> AttendLatents:
        self._has_latents = True
        return self._latents.attention(params)

    def experts(
        self,
        router: RouterParams,
        gate_up: Sequence[Operation],
        down: Sequence[Operation],
        *,
        slots: ExpertSlotMap | None = None,
        trace: ExpertTrace | None = None,
        layer: int = 0,
    ) -> ComputeExperts:
        products = self._products(gate_up, down)

        def apply(x: Value, scores: Value) -> Value:
            recording = x.recording
            assert slots is not None or scores.size == len(down)
            out = x.another(x.size, is_float=True)
            recording.clear(out)
            args = abi.CComputeExperts(
                router=c_router_params(router, scores.size),
                experts=products.c_experts,
                slot_map=c_slot_map(slots, scores.size),
                counts=None if trace is None else trace.counts[layer].data_ptr(),
            )
            recording.append(abi.OP_COMPUTE_EXPERTS, args, reads={"x": x, "scores": scores}, writes={"hidden": out})
            if trace is not None and trace.keeps_ids:
                recording.reserve.append(partial(_reserve_trace, args, trace, layer))
            return out

        return apply

    def expert_products(self, gate_up: Sequence[Operation], down: Sequence[Operation]) -> ExpertProducts:
        return self._products(gate_up, down)

    def _products(self, gate_up: Sequence[Operation], down: Sequence[Operation]) -> NativeProducts:
        return NativeProducts(self.library, gate_up, down, self._scratch, num_threads=self.num_threads)

    def route(self, scores: Tensor, router: RouterParams) -> tuple[Tensor, Tensor]:
        return native_route(self.library, scores, router, self.dtype, self.num_threads)

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
        return inputs[0].recording.host(function, inputs, size=size, is_sequence_sharded=is_sequence_sharded)

    def add(self, a: Value, b: Value) -> Value:
        return a.recording.add(a, b)

    def all_reduce(self, x: Value, group: TensorParallelGroup) -> Value:
        return x if group.size == 1 else x.recording.all_reduce(x, group)

    def compile(
        self,
        compute: Compute,
        *,
        rope: Rope,
        windows: frozenset[int | None],
        device: torch.device,
        tp: TensorParallelGroup = SINGLE_RANK,
    ) -> Forward:
        return _NativeForward(self, compute, rope, tp, self._latents if self._has_latents else None)

    @property
    def ranking(self) -> Ranking:
        return NativeRanking(self.library, num_threads=self.num_threads)

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def cache_block(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """See `csrc/attention.h`."""
        return num_kv_heads, 2, -(-block_size // abi.NUM_LANES) * abi.NUM_LANES * head_dim

    def mla_cache_block(self, block_size: int, size: int) -> tuple[int, ...]:
        return mla_cache_block(block_size, size)  # torch computes this attention


class _NativeForward:
    """A `Forward`. The pass is recorded at the first call, and again for another cache, because its ops hold the
    cache's addresses."""

    def __init__(
        self, backend: CpuBackend, compute: Compute, rope: Rope, tp: TensorParallelGroup, latents: NativeMLA | None
    ) -> None:
        self._backend = backend
        self._compute = compute
        self._rope = rope
        self._tp = tp
        self._latents = latents
        self._cache: KVCache | None = None
        self._program: Program | None = None

    def __call__(self, x: Int32Array | Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        hidden = x if isinstance(x, Tensor) else None
        if self._program is None or cache is not self._cache:
            self._program, self._cache = self._record(hidden, cache), cache
        if self._latents is not None:
            self._latents.prepare(batch, cache, self._rope)
        return self._program.run(hidden, batch)

    def _record(self, hidden: Tensor | None, cache: KVCache) -> Program:
        recording = Recording()
        source = recording.value(0 if hidden is None else hidden.shape[1], is_float=True)
        result: Value = self._compute(source, cache.layers, cache.block_size)
        return Program(
            self._backend.library,
            recording,
            source=None if hidden is None else source,
            result=result,
            dtype=self._backend.dtype,
            rope=self._rope,
            num_threads=self._backend.num_threads,
            tp=self._tp,
        )


def _reserve_trace(args: CStruct, trace: ExpertTrace, layer: int, num_rows: int) -> None:
    """Make room in the trace, and point the op at the new memory."""
    trace.reserve(num_rows)
    rows = trace.buffer(layer)
    args.trace = abi.CExpertTrace(ids=rows.data_ptr(), stride=rows.stride(0), is_wide=rows.dtype == torch.uint16)


def _embedding(values: Tensor, size: int, num_own: int, first: int, *, is_packed: bool) -> Operation:
    def apply(token_ids: Value) -> Value:
        out = token_ids.recording.value(size, is_float=True)
        args = abi.CEmbed(values=values.data_ptr(), is_packed=is_packed, size=size, first=first, num_own=num_own)
        token_ids.recording.append(abi.OP_EMBED, args, reads={}, writes={"out": out})
        return out

    return apply
