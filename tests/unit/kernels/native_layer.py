"""A layer's paged cache for tests of the CPU's attention, and what its attention is in float64."""

from __future__ import annotations

import ctypes
import math

import torch
from native_requests import Batch, Request, shuffled_blocks
from torch import Tensor

from eagleray.kernels.cpu.abi import abi

DTYPES = (torch.float32, torch.bfloat16)  # a dtype's number is its index
EPS = 1e-6
MAX_CONTEXT = 4096
CACHE_DTYPES = {abi.CACHE_INT8: torch.int8, abi.CACHE_FP8: torch.float8_e4m3fn}


class Layer:
    """A layer's cache, and the requests that have blocks of it."""

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype = torch.bfloat16,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 16,
        window: int = 0,
        norm: bool = False,
        sinks: bool = False,
        threads: int = 1,
        cache_format: int = abi.CACHE_PLAIN,
    ) -> None:
        self.library, self.dtype, self.threads = library, dtype, threads
        self.sinks = torch.linspace(-3, 5, heads) if sinks else None
        scale, there = 1 / math.sqrt(head_dim), None if self.sinks is None else self.sinks.data_ptr()
        sizes = heads, kv_heads, head_dim, block_size, window
        self.params = abi.CAttentionParams(*sizes, scale, there, cache_format)
        self.lanes = -(-block_size // 16) * 16
        self.norms = [torch.rand(head_dim) + 0.5 if norm else None for _ in range(2)]
        angles = torch.arange(MAX_CONTEXT)[:, None] * 0.5 ** torch.arange(head_dim // 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.num_blocks = 0
        self.cache_dtype = CACHE_DTYPES.get(cache_format, dtype)
        self.cache = torch.zeros(0, dtype=self.cache_dtype)
        self.scratch = torch.zeros(library.er_attention_scratch_size(self.params, MAX_CONTEXT, threads) // 4 + 1)
        self.queries = torch.zeros(0)

    @property
    def width(self) -> int:
        return (self.params.num_heads + 2 * self.params.num_kv_heads) * self.params.head_dim

    def new_requests(self, sizes: list[int], scale: float = 1.0) -> list[Request]:
        """Make requests of these sizes with a new cache."""
        blocks, self.num_blocks = shuffled_blocks(sizes, self.params.block_size)
        size = self.num_blocks * self.library.er_block_elements(self.params)
        self.cache = torch.zeros(size, dtype=torch.uint8 if self.has_scales else self.dtype)
        return [Request(torch.randn(n, self.width) * scale, mine) for n, mine in zip(sizes, blocks, strict=True)]

    def views(self) -> tuple[Tensor, Tensor]:
        """Keys and values [blocks, kv heads, lanes, head_dim] of the cache. Codes are multiplied by their scales."""
        keys, values = self._numbers()
        keys = keys.unflatten(-1, (-1, self.lanes, self.pair)).transpose(-3, -2).flatten(-2)
        values = values.unflatten(-1, (-1, self.params.head_dim, self.pair)).transpose(-2, -1).flatten(-3, -2)
        if not self.has_scales:
            return keys, values
        key_scales, value_scales = self.scales().double().unbind(2)
        return keys.double() * key_scales[..., None], values.double() * value_scales[..., None]

    def _numbers(self) -> Tensor:
        """Return [2, blocks, kv heads, numbers]: those of keys, and those of values."""
        size = self.lanes * self.params.head_dim
        heads = self.cache.view(self.num_blocks, self.params.num_kv_heads, -1)[..., : 2 * size]
        return heads.view(self.cache_dtype).unflatten(-1, (2, size)).movedim(2, 0)

    def scales(self) -> Tensor:
        """Return bfloat16 [blocks, kv heads, 2, lanes]: the scales of keys, and those of values."""
        heads = self.cache.view(self.num_blocks, self.params.num_kv_heads, -1)
        return heads[..., 2 * self.lanes * self.params.head_dim :].view(torch.bfloat16).unflatten(-1, (2, self.lanes))

    @property
    def has_scales(self) -> bool:
        return self.params.cache_format != abi.CACHE_PLAIN

    @property
    def pair(self) -> int:
        return 2 if self.has_scales else 4 // self.dtype.itemsize

    def poison(self, number: float) -> None:
        """Fill all blocks, as if other requests had used them."""
        if self.has_scales:  # which are NaN for numbers that codes cannot express
            self.scales()[..., : self.params.block_size] = number
            number = 127 if self.params.cache_format == abi.CACHE_INT8 else 448
        keys, values = self._numbers()
        keys.unflatten(-1, (-1, self.lanes, self.pair))[..., : self.params.block_size, :] = number
        values = values.unflatten(-1, (-1, self.params.head_dim, self.pair))
        for lane in range(self.params.block_size):
            values[..., lane // self.pair, :, lane % self.pair] = number

    def step(self, *work: tuple[Request, int]) -> list[Tensor]:
        """Compute the next tokens of these requests, and return their results."""
        batch = Batch(work, self.params.block_size)
        self.queries = torch.empty(len(batch.features), self.params.num_heads * self.params.head_dim, dtype=self.dtype)
        out = torch.full_like(self.queries, 7)
        norms = [None if norm is None else norm.data_ptr() for norm in self.norms]
        numbers = DTYPES.index(self.dtype), self.threads
        tables = *norms, EPS, self.cos.data_ptr(), self.sin.data_ptr()
        addresses = self.queries.data_ptr(), self.cache.data_ptr()
        self.library.er_prepare(self.params, batch.metadata, batch.features.data_ptr(), *tables, *addresses, *numbers)
        self.library.er_attend(
            self.params, batch.metadata, *addresses, out.data_ptr(), self.scratch.data_ptr(), *numbers
        )
        return batch.finish(out)

    def prepared(self, request: Request) -> tuple[Tensor, Tensor]:
        """Keys and values of the request in the cache, [done, kv heads, head_dim]."""
        slots, block_size = request.slots(self.params.block_size), self.params.block_size
        blocks, lanes = slots // block_size, slots % block_size
        keys, values = self.views()
        return keys[blocks, :, lanes], values[blocks, :, lanes]

    def truth(self, request: Request, queries: Tensor) -> Tensor:
        """Attention of the last queries [n, heads * head_dim] over the cache, in float64."""
        keys, values = (x.double().repeat_interleave(self.group, dim=1) for x in self.prepared(request))
        n = len(queries)
        queries = queries.view(n, self.params.num_heads, -1).double()
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.params.scale
        distance = torch.arange(request.done - n, request.done)[:, None] - torch.arange(request.done)
        hidden = (distance < 0) | ((distance >= self.params.window) & (self.params.window > 0))
        scores = scores.masked_fill(hidden, -math.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, n, 1)), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : request.done], values).flatten(1)

    @property
    def group(self) -> int:
        return self.params.num_heads // self.params.num_kv_heads


def run(layer: Layer, request: Request, counts: list[int]) -> Tensor:
    """Compute a request in steps of `counts` tokens."""
    return torch.cat([layer.step((request, count))[0] for count in counts])
