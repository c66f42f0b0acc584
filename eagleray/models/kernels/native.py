"""A CPU's kernels in C++ (`native/`): the forward pass is recorded once and then run by one native call.

Hidden states are float32 between the layers, whatever the model's dtype; what enters a product is rounded to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagleray.models.batch import Batch, Int32Array
from eagleray.models.cache import KVCache
from eagleray.models.kernels import abi
from eagleray.models.kernels.memory import WeightMemory
from eagleray.models.kernels.program import Program, threads_for
from eagleray.models.kernels.ranking import NativeRanking, Ranking
from eagleray.models.kernels.recording import Recording, Value
from eagleray.models.kernels.reference import Compute, Context, Forward, Heads, Kernels, Mixture, Operation, Rows
from eagleray.models.layers.rope import Rope
from eagleray.models.spec import ModelSpec
from eagleray.parallel import Group

__all__ = ["MAX_HEAD_DIM", "NativeKernels"]

LANES = 16
MAX_HEAD_DIM = 256


class NativeKernels(Kernels):
    """`library`: of `build.native_library`."""

    is_invariant = True

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, *, num_threads: int) -> None:
        abi.declare(library)
        self.library = library
        self.dtype = dtype
        self.num_threads = num_threads
        self._kind = int(dtype == torch.bfloat16)
        self._memory = WeightMemory()

    @staticmethod
    def serves(dtype: torch.dtype, spec: ModelSpec) -> bool:
        """Whether there are kernels for such a model."""
        sizes = [spec.hidden_size, spec.head_dim, spec.intermediate_size]
        if spec.moe is not None:
            sizes.append(spec.moe.intermediate_size)
        is_even = all(size % 2 == 0 for size in sizes)
        return dtype in (torch.float32, torch.bfloat16) and is_even and spec.head_dim <= MAX_HEAD_DIM

    def linear(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        n, k = weight.shape
        packed = self._memory.take(self.library.er_packed_size(n, k, self._kind), self.dtype)
        weight = weight.contiguous()
        self.library.er_pack(weight.data_ptr(), k, n, k, packed.data_ptr(), self._kind, 1)
        return NativeLinear(self, packed, bias, n=n, k=k, is_gated=False)

    def gated_linear(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        inner, k = weight.shape[0] // 2, weight.shape[1]
        padded = -(-inner // LANES) * LANES  # a panel has as many gates and as many that they gate
        packed = self._memory.take(self.library.er_packed_size(2 * padded, k, self._kind), self.dtype)
        gate, up = weight.contiguous().chunk(2)
        self.library.er_pack_gate_up(gate.data_ptr(), up.data_ptr(), k, inner, k, packed.data_ptr(), self._kind, 1)
        return NativeLinear(self, packed, bias, n=2 * inner, k=k, is_gated=True)

    def multiply(self, product: abi.Product) -> None:
        threads = threads_for(product.n * product.k, self.dtype, product.num_rows, self.num_threads)
        self.library.er_multiply(product, 1, self._kind, threads)

    def norm(self, weight: Tensor, eps: float) -> Operation:
        kept = weight.float()

        def apply(x: Value) -> Value:
            out = x.recording.value(x.size, is_float=False)
            what = abi.Normalize(size=x.size, weight=kept.data_ptr(), eps=eps)
            x.recording.append(abi.NORMALIZE, what, reads={"x": x}, writes={"out": out})
            return out

        return apply

    def embedding(self, weight: Tensor, first: int) -> Operation:
        return _embedding(weight, weight.shape[1], len(weight), first, is_packed=False)

    def tied_embedding(self, weight: Tensor, first: int) -> tuple[Operation, Operation]:
        product = self.linear(weight, None)
        return _embedding(product.packed, weight.shape[1], len(weight), first, is_packed=True), product

    def self_attention(self, heads: Heads) -> Callable[[Rows, Tensor, Context], Rows]:
        norms = [None if weight is None else weight.float() for weight in (heads.q_norm, heads.k_norm)]
        size = heads.num_heads * heads.head_dim

        def apply(qkv: Value, cache: Tensor, block_size: int) -> Value:
            recording = qkv.recording
            queries, out = recording.value(size, is_float=False), recording.value(size, is_float=False)
            shape = abi.AttentionShape(
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                block_size=block_size,
                window=heads.window or 0,
                scale=heads.head_dim**-0.5,
            )
            q_norm, k_norm = (None if weight is None else weight.data_ptr() for weight in norms)
            what = abi.Attend(shape=shape, q_norm=q_norm, k_norm=k_norm, eps=heads.norm_eps, cache=cache.data_ptr())
            recording.append(abi.ATTEND, what, reads={"qkv": qkv}, writes={"queries": queries, "out": out})
            return out

        return apply

    def experts(
        self, mixture: Mixture, gate_up: Sequence[Operation], down: Sequence[Operation]
    ) -> Callable[[Rows, Rows], Rows]:
        first, last = _weights(gate_up), _weights(down)
        pointers = [(ctypes.c_void_p * len(part))(*(one.packed.data_ptr() for one in part)) for part in (first, last)]

        def apply(x: Value, scores: Value) -> Value:
            recording = x.recording
            out = recording.value(x.size, is_float=True)
            recording.clear(out)
            what = abi.Mix(
                num_experts=len(first),
                top_k=mixture.top_k,
                size=x.size,
                inner=last[0].k,
                gate_up=ctypes.addressof(pointers[0]),
                down=ctypes.addressof(pointers[1]),
                renormalize=mixture.renormalize,
                round_weights=mixture.round_weights,
            )
            recording.append(abi.MIX, what, reads={"x": x, "scores": scores}, writes={"hidden": out})
            return out

        return apply

    def add(self, a: Value, b: Value) -> Value:
        return a.recording.add(a, b)

    def all_reduce(self, x: Value, group: Group) -> Value:
        return x if group.size == 1 else x.recording.all_reduce(x, group)

    def compile(self, compute: Compute, *, rope: Rope, windows: frozenset[int | None], device: torch.device) -> Forward:
        return _NativeForward(self, compute, rope)

    @property
    def ranking(self) -> Ranking:
        return NativeRanking(self.library, num_threads=self.num_threads)

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def cache_block(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """See `native/attention.h`."""
        return num_kv_heads, 2, -(-block_size // LANES) * LANES * head_dim


class NativeLinear:
    """Products with a packed weight. Those with a tensor are computed at once, and overwritten by the next call."""

    def __init__(
        self, kernels: NativeKernels, packed: Tensor, bias: Tensor | None, *, n: int, k: int, is_gated: bool
    ) -> None:
        self.packed = packed
        self.n, self.k = n, k
        self.bias = None if bias is None else bias.float()
        self._is_gated = is_gated
        self._size = n // 2 if is_gated else n
        self._ending = abi.ENDING_SILU if is_gated else abi.ENDING_STORE
        self._kernels = kernels
        self._out = torch.empty(0, self._size, dtype=kernels.dtype if is_gated else torch.float32)

    def __call__(self, x: Value | Tensor) -> Value | Tensor:
        weight, bias = self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr()
        if isinstance(x, Tensor):
            return self._compute(x.contiguous(), weight, bias)
        out = x.recording.value(self._size, is_float=not self._is_gated)
        what = abi.Multiply(n=self.n, k=self.k, ending=self._ending, weight=weight, bias=bias)
        x.recording.append(abi.MULTIPLY, what, reads={"x": x}, writes={"out": out})
        return out

    def _compute(self, x: Tensor, weight: int, bias: int | None) -> Tensor:
        assert x.dtype == self._kernels.dtype and x.shape[1] == self.k
        if len(x) > len(self._out):
            self._out = torch.empty(len(x), self._size, dtype=self._out.dtype)
        product = abi.Product(
            x=x.data_ptr(),
            x_stride=self.k,
            num_rows=len(x),
            weight=weight,
            n=self.n,
            k=self.k,
            bias=bias,
            ending=self._ending,
            y=self._out.data_ptr(),
            y_stride=self._size,
        )
        self._kernels.multiply(product)
        return self._out[: len(x)]


class _NativeForward:
    """Recorded when it is first called, and anew for another cache: its steps say where the cache is."""

    def __init__(self, kernels: NativeKernels, compute: Compute, rope: Rope) -> None:
        self._kernels = kernels
        self._compute = compute
        self._rope = rope
        self._cache: KVCache | None = None
        self._program: Program | None = None

    def __call__(self, x: Int32Array | Tensor, batch: Batch, cache: KVCache) -> Tensor:
        rows = x if isinstance(x, Tensor) else None
        if self._program is None or cache is not self._cache:
            self._program, self._cache = self._record(rows, cache), cache
        return self._program.run(rows, batch)

    def _record(self, rows: Tensor | None, cache: KVCache) -> Program:
        recording = Recording()
        source = recording.value(0 if rows is None else rows.shape[1], is_float=True)
        result: Value = self._compute(source, cache.layers, cache.block_size)
        return Program(
            self._kernels.library,
            recording,
            source=None if rows is None else source,
            result=result,
            dtype=self._kernels.dtype,
            rope=self._rope,
            num_threads=self._kernels.num_threads,
        )


def _embedding(values: Tensor, size: int, num_own: int, first: int, *, is_packed: bool) -> Operation:
    def apply(token_ids: Value) -> Value:
        out = token_ids.recording.value(size, is_float=True)
        what = abi.Embed(values=values.data_ptr(), is_packed=is_packed, size=size, first=first, num_own=num_own)
        token_ids.recording.append(abi.EMBED, what, reads={}, writes={"out": out})
        return out

    return apply


def _weights(operations: Sequence[Operation]) -> list[NativeLinear]:
    assert all(isinstance(operation, NativeLinear) and operation.bias is None for operation in operations)
    return [operation for operation in operations if isinstance(operation, NativeLinear)]
