"""The backend of NVIDIA GPUs: a recorded forward pass runs as launches on fixed buffers, captured as graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.kernels.adapters import AdapterTable
from eagleray.kernels.backend import ExpertProducts
from eagleray.kernels.cuda.adapters import CudaAdapterSite
from eagleray.kernels.cuda.experts import CudaExperts
from eagleray.kernels.cuda.linear import CudaEmbedding, CudaLinear
from eagleray.kernels.cuda.lowering import lower
from eagleray.kernels.cuda.program import CudaProgram
from eagleray.kernels.cuda.ranking import DeviceRanking
from eagleray.kernels.cuda.triton.tile_product import NATIVE_FP8
from eagleray.kernels.params import ClampedSwiglu, RouterParams
from eagleray.kernels.quantized import LoadedWeight, Weight, WeightFormat, in_blocks, unquantized
from eagleray.kernels.ranking import Ranking
from eagleray.kernels.recording import LinearWeight, Recording
from eagleray.kernels.recording_backend import RecordingBackend
from eagleray.kernels.rope import Rope
from eagleray.kernels.torch.mla import mla_cache_block
from eagleray.kernels.torch.routing import route
from eagleray.parallel.group import TensorParallelGroup


class CudaBackend(RecordingBackend):
    """See `RecordingBackend`. On a CPU the kernels are interpreted, for tests. `captures`: see `CudaProgram`;
    `prefills_by_fa3`: let FlashAttention-3 compute rows with several queries."""

    compiles_on_demand = True
    is_batch_invariant = False
    kept_formats = frozenset((WeightFormat.FP8, WeightFormat.MXFP4))

    def __init__(self, dtype: torch.dtype, *, captures: bool = True, prefills_by_fa3: bool = False) -> None:
        super().__init__(dtype)
        self._captures = captures
        self.prefills_by_fa3 = prefills_by_fa3

    def adapter_site(self, table: AdapterTable, in_features: int, out_features: Sequence[int]) -> CudaAdapterSite:
        return CudaAdapterSite(table, in_features, out_features)

    def pack_linear(self, weight: LoadedWeight, bias: Tensor | None) -> CudaLinear:
        return CudaLinear(in_blocks(weight), bias)

    def pack_exact_linear(self, weight: Tensor) -> CudaLinear:
        return CudaLinear(weight.float(), None, is_float32=True)

    def pack_gated_linear(self, weight: LoadedWeight, bias: Tensor | None, clamp: ClampedSwiglu | None) -> CudaLinear:
        return CudaLinear(in_blocks(weight), bias, is_gated=True, clamp=clamp)

    def pack_embedding(self, weight: Tensor, first: int) -> CudaEmbedding:
        return CudaEmbedding(weight, first)

    def pack_tied_embedding(self, weight: Weight, first: int) -> tuple[CudaEmbedding, CudaLinear]:
        product = self.pack_linear(weight, None)
        return CudaEmbedding(unquantized(product.weight), first), product

    def pack_experts(self, gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight]) -> ExpertProducts:
        return CudaExperts(gate_up, down, self.dtype)

    def lower(
        self, recording: Recording, *, rope: Rope, device: torch.device, tp: TensorParallelGroup, block_size: int
    ) -> CudaProgram:
        lowered = lower(recording, device, prefills_by_fa3=self.prefills_by_fa3)
        return CudaProgram(lowered, rope=rope, device=device, tp=tp, block_size=block_size, captures=self._captures)

    def route(self, scores: Tensor, router: RouterParams) -> tuple[Tensor, Tensor]:
        return route(scores, router)

    @property
    def ranking(self) -> Ranking:
        return DeviceRanking()

    def serves_cache(self, cache_dtype: torch.dtype, device: torch.device, *, of_latents: bool) -> bool:
        is_fp8 = cache_dtype == torch.float8_e4m3fn
        return is_fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= NATIVE_FP8

    def cache_block(
        self, block_size: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype
    ) -> tuple[int, ...]:
        return block_size, 2 * num_kv_heads, head_dim

    def mla_cache_block(self, block_size: int, size: int) -> tuple[int, ...]:
        return mla_cache_block(block_size, size)
