"""The backend of CPUs: a forward pass is recorded once and then run by one call of the C++ kernels in `csrc/`.

Hidden states are float32 between the layers in a model of any dtype; the inputs of products are rounded to that dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from eagleray.kernels.adapters import AdapterTable
from eagleray.kernels.backend import ExpertProducts, WeightAllocator
from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.adapters import NativeAdapterSite
from eagleray.kernels.cpu.experts import ExpertScratch, NativeProducts, native_route
from eagleray.kernels.cpu.grouped import Grouping, in_groups, layout, pack, packed_size, quantize
from eagleray.kernels.cpu.huge_pages import WeightMemory
from eagleray.kernels.cpu.linear import NativeEmbedding, NativeLinear
from eagleray.kernels.cpu.lowering import CACHE_FORMATS, lower
from eagleray.kernels.cpu.mapped_files import RowReader
from eagleray.kernels.cpu.mla import NativeMLA
from eagleray.kernels.cpu.program import CpuProgram
from eagleray.kernels.cpu.ranking import NativeRanking
from eagleray.kernels.grouped import GroupedWeight
from eagleray.kernels.params import ClampedSwiglu, MLAParams, RouterParams
from eagleray.kernels.quantized import LoadedWeight, RowParts, Weight, WeightFormat, quantize_fp8
from eagleray.kernels.ranking import Ranking
from eagleray.kernels.recording import LinearWeight, Recording
from eagleray.kernels.recording_backend import RecordingBackend
from eagleray.kernels.rope import Rope
from eagleray.kernels.torch.mla import mla_cache_block
from eagleray.parallel.group import TensorParallelGroup


class CpuBackend(RecordingBackend):
    """See `RecordingBackend`. `library` is that of `native_library`; at most `num_threads` threads compute."""

    is_batch_invariant = True
    takes_parts = True

    def __init__(
        self, library: ctypes.CDLL, dtype: torch.dtype, *, num_threads: int, memory: WeightAllocator | None = None
    ) -> None:
        super().__init__(dtype)
        self.kept_formats = frozenset(WeightFormat) if dtype == torch.bfloat16 else frozenset[WeightFormat]()
        self.library = library
        self.num_threads = num_threads
        self._kind = int(dtype == torch.bfloat16)
        self._memory = memory or WeightMemory()
        self._adapter_memory = WeightMemory()
        self._scratch = ExpertScratch()
        self._reader = RowReader()

    @staticmethod
    def serves(dtype: torch.dtype, *, feature_sizes: Sequence[int], head_dim: int) -> bool:
        """Whether there are kernels for a model of this dtype. `feature_sizes`: see `ModelSpec.feature_sizes`."""
        is_even = all(size % 2 == 0 for size in feature_sizes)
        return dtype in (torch.float32, torch.bfloat16) and is_even and head_dim <= abi.MAX_HEAD_DIM

    def with_memory(self, memory: WeightAllocator) -> CpuBackend:
        return CpuBackend(self.library, self.dtype, num_threads=self.num_threads, memory=memory)

    def pack_linear(self, weight: LoadedWeight, bias: Tensor | None) -> NativeLinear:
        n, k = weight.shape
        if (groups := self._in_groups(weight)) is not None:
            return self._pack_groups(groups, bias, is_gated=False)
        weight = self._plain(weight)
        packed = self._memory.allocate(self._packed_size(n, k), self.dtype)
        first = 0
        for part in _parts(weight, multiple=abi.PANEL_ROWS):
            self._pack_rows(part, packed[self._packed_size(first, k) :])
            first += len(part)
        return self._linear(packed, bias, n=n, k=k, is_gated=False)

    def _pack_rows(self, part: Tensor, packed: Tensor) -> None:
        k, to = part.shape[1], packed.data_ptr()
        for rows, (address,) in self._reader.rows([part], abi.PANEL_ROWS):
            offset = self._packed_size(rows.start, k) * self.dtype.itemsize
            self.library.er_pack(address, k, len(rows), k, to + offset, self._kind, 1)

    def _in_groups(self, weight: LoadedWeight) -> GroupedWeight | None:
        if isinstance(weight, Tensor | RowParts) or self.dtype != torch.bfloat16:
            return None
        return in_groups(weight)

    def _plain(self, weight: LoadedWeight) -> Tensor | RowParts:
        """Decode a quantized weight that the kernels do not read."""
        return weight if isinstance(weight, Tensor | RowParts) else weight.dequantize(self.dtype)

    def _pack_groups(
        self, weight: GroupedWeight, bias: Tensor | None, *, is_gated: bool, clamp: ClampedSwiglu | None = None
    ) -> NativeLinear:
        n, k = weight.shape
        inner = n // 2 if is_gated else 0
        grouping, padded = layout(weight), 2 * _padded(inner) if is_gated else n
        packed = self._memory.allocate(packed_size(self.library, grouping, padded, k), torch.uint8)
        pack(self.library, weight, packed, inner=inner)
        return self._linear(packed, bias, n=n, k=k, is_gated=is_gated, clamp=clamp, grouping=grouping)

    def quantizer(self, kind: WeightFormat, *, is_head: bool = False) -> Callable[[Tensor], Weight]:
        if kind is WeightFormat.FP8:
            return quantize_fp8
        return partial(quantize, self.library, kind=kind, is_head=is_head)

    def pack_exact_linear(self, weight: Tensor) -> NativeLinear:
        return self.pack_linear(weight, None)  # it rounds nothing

    def pack_gated_linear(self, weight: LoadedWeight, bias: Tensor | None, clamp: ClampedSwiglu | None) -> NativeLinear:
        inner, k = weight.shape[0] // 2, weight.shape[1]
        if (groups := self._in_groups(weight)) is not None:
            return self._pack_groups(groups, bias, is_gated=True, clamp=clamp)
        weight = self._plain(weight)
        packed = self._memory.allocate(self._packed_size(2 * _padded(inner), k), self.dtype)
        halves = weight.parts if isinstance(weight, RowParts) else weight.contiguous().chunk(2)
        for rows, (gate, up) in self._reader.rows(halves, abi.NUM_LANES):
            to = packed.data_ptr() + self._packed_size(2 * rows.start, k) * self.dtype.itemsize
            self.library.er_pack_gate_up(gate, up, k, len(rows), k, to, self._kind, 1)
        return self._linear(packed, bias, n=2 * inner, k=k, is_gated=True, clamp=clamp)

    def _packed_size(self, n: int, k: int) -> int:
        return _packed_size(self.library, n, k, self._kind)

    def pack_embedding(self, weight: Tensor, first: int) -> NativeEmbedding:
        num_own, size = weight.shape
        return NativeEmbedding(weight, size=size, num_own=num_own, first=first, is_packed=False)

    def pack_tied_embedding(self, weight: Weight, first: int) -> tuple[NativeEmbedding, NativeLinear]:
        (num_own, size), product = weight.shape, self.pack_linear(weight, None)
        table = NativeEmbedding(
            product.packed, size=size, num_own=num_own, first=first, is_packed=True, grouping=product.grouping
        )
        return table, product

    def pack_mla(self, params: MLAParams) -> NativeMLA:
        absorbing = params.keys.transpose(1, 2)  # [num_heads, rank, plain_dim] maps queries to absorbed ones
        return NativeMLA(params, keys=self._pack_heads(absorbing), values=self._pack_heads(params.values))

    def _pack_heads(self, matrices: Tensor) -> Tensor:
        """Pack [num_heads, n, k], head after head."""
        num_heads, n, k = matrices.shape
        size = self._packed_size(n, k)
        packed = self._memory.allocate(num_heads * size, self.dtype)
        for matrix, part in zip(matrices, packed.split(size), strict=True):
            rows = matrix.contiguous()
            self.library.er_pack(rows.data_ptr(), k, n, k, part.data_ptr(), self._kind, 1)
        return packed

    def pack_experts(self, gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight]) -> ExpertProducts:
        return NativeProducts(self.library, gate_up, down, self._scratch, num_threads=self.num_threads)

    def lower(
        self, recording: Recording, *, rope: Rope, device: torch.device, tp: TensorParallelGroup, block_size: int
    ) -> CpuProgram:
        return CpuProgram(self.library, lower(recording), rope=rope, num_threads=self.num_threads, tp=tp)

    def route(self, scores: Tensor, router: RouterParams) -> tuple[Tensor, Tensor]:
        return native_route(self.library, scores, router, self.dtype, self.num_threads)

    @property
    def ranking(self) -> Ranking:
        return NativeRanking(self.library, num_threads=self.num_threads)

    def adapter_site(self, table: AdapterTable, in_features: int, out_features: Sequence[int]) -> NativeAdapterSite:
        return NativeAdapterSite(table, self._adapter_memory, in_features, out_features)

    def serves_cache(self, cache_dtype: torch.dtype, device: torch.device, *, of_latents: bool) -> bool:
        return not of_latents and cache_dtype in CACHE_FORMATS

    def cache_block(
        self, block_size: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype
    ) -> tuple[int, ...]:
        """See `csrc/attention.h`. Keys and values of 8 bits are followed by two scales of 2 bytes for each token."""
        num_scale_bytes = 4 if cache_dtype in CACHE_FORMATS else 0
        lanes = -(-block_size // abi.NUM_LANES) * abi.NUM_LANES
        return num_kv_heads, lanes * (2 * head_dim + num_scale_bytes)

    def mla_cache_block(self, block_size: int, size: int) -> tuple[int, ...]:
        return mla_cache_block(block_size, size)

    def _linear(
        self,
        packed: Tensor,
        bias: Tensor | None,
        *,
        n: int,
        k: int,
        is_gated: bool,
        clamp: ClampedSwiglu | None = None,
        grouping: Grouping | None = None,
    ) -> NativeLinear:
        return NativeLinear(
            self.library,
            packed,
            bias,
            dtype=self.dtype,
            grouping=grouping,
            n=n,
            k=k,
            is_gated=is_gated,
            clamp=clamp,
            num_threads=self.num_threads,
        )


def _padded(inner: int) -> int:
    """Return the number of gates of whole panels: a panel has equally many gates and gated outputs."""
    return -(-inner // abi.NUM_LANES) * abi.NUM_LANES


@lru_cache(maxsize=1024)
def _packed_size(library: ctypes.CDLL, n: int, k: int, kind: int) -> int:
    size: int = library.er_packed_size(n, k, kind)
    return size


def _parts(weight: Tensor | RowParts, *, multiple: int) -> Sequence[Tensor]:
    """Return contiguous parts of a weight, all but the last of a multiple of `multiple` rows."""
    if not isinstance(weight, RowParts):
        return [weight.contiguous()]
    return weight.parts if all(len(part) % multiple == 0 for part in weight.parts[:-1]) else [torch.cat(weight.parts)]
