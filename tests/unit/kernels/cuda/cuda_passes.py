"""A small model on the kernels of NVIDIA GPUs or in plain torch, and batches for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.backend import HiddenStates
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.cuda.program import CudaProgram
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import ForwardBatch, PassLimits
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.params import AttentionParams, RouterParams
from eagleray.kernels.recording_backend import RecordedForward
from eagleray.kernels.rope import Rope
from eagleray.kernels.rope_spec import DefaultRope
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.parallel.group import SingleRankGroup, TensorParallelGroup

CPU = torch.device("cpu")
SIZE, INNER, HEAD_DIM, VOCAB, NUM_EXPERTS, BLOCK_SIZE = 16, 24, 16, 40, 4, 4
LIMITS = PassLimits(num_tokens=24, num_rows=8, num_positions=40)
ATTENTION = AttentionParams(
    num_heads=2, num_kv_heads=1, head_dim=HEAD_DIM, window=None, q_norm=None, k_norm=None, norm_eps=1e-6
)
ROUTER = RouterParams(top_k=2, renormalize=True, round_weights=False)

Rows = list[tuple[int, int]]
"""(cached tokens, tokens to compute) of each row"""


def batch_of(rows: Rows, *, seed: int = 0, last_tokens: Tensor | None = None) -> ForwardBatch:
    """A batch of rows with blocks of their own. With `last_tokens`, rows of one token take it from there."""
    rows = sorted(rows, key=lambda row: row[1] != 1)
    random = np.random.default_rng(seed)
    contexts = np.array([cached + queries for cached, queries in rows], np.int32)
    width = -(-int(contexts.max(initial=1)) // BLOCK_SIZE)
    table = 1 + np.arange(len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    positions = [np.arange(cached, cached + queries) for cached, queries in rows]
    slots = [table[row, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row, p in enumerate(positions)]
    num_decodes = sum(queries == 1 for _, queries in rows)
    starts = np.cumsum([0, *(queries for _, queries in rows)], dtype=np.int32)
    token_ids = random.integers(0, VOCAB, int(starts[-1]), dtype=np.int32)
    if last_tokens is not None:
        token_ids[:num_decodes] = -1 - np.arange(num_decodes)
    return ForwardBatch(
        token_ids=token_ids,
        positions=np.concatenate([np.empty(0), *positions]).astype(np.int32),
        slot_mapping=np.concatenate([np.empty(0), *slots]).astype(np.int32),
        block_table=table,
        seq_lens=contexts,
        query_start_loc=starts,
        num_decodes=num_decodes,
        last_tokens=last_tokens,
    )


NO_ROWS = ForwardBatch(
    token_ids=np.empty(0, np.int32),
    positions=np.empty(0, np.int32),
    slot_mapping=np.empty(0, np.int32),
    block_table=np.empty((0, 0), np.int32),
    seq_lens=np.empty(0, np.int32),
    query_start_loc=np.zeros(1, np.int32),
    num_decodes=0,
)

DECODES: Rows = [(3, 1), (0, 1), (17, 1)]
MIXED: Rows = [(5, 1), (0, 7), (9, 1), (6, 3)]
LONG: Rows = [(2, 1), (0, 17)]


class Layers:
    """Layers of a model, on any backend, with the same weights. `options` are those of `AttentionParams`."""

    def __init__(
        self,
        backend: TorchBackend | CudaBackend,
        *,
        trace: ExpertTrace | None = None,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(11)
        self.backend = backend
        self.embed = backend.embedding(self.random(VOCAB, SIZE), 0)
        self.norms = [backend.norm(1 + self.random(SIZE), 1e-6) for _ in range(3)]
        self.qkv = backend.linear(self.random(4 * HEAD_DIM, SIZE), self.random(4 * HEAD_DIM))
        self.attend = backend.self_attention(replace(ATTENTION, **options))
        self.project = backend.linear(self.random(SIZE, 2 * HEAD_DIM), None)
        self.gate_up = backend.gated_linear(self.random(2 * INNER, SIZE), None)
        self.down = backend.linear(self.random(SIZE, INNER), None)
        self.router = backend.exact_linear(self.random(NUM_EXPERTS, SIZE))
        gate_up = [backend.gated_linear(self.random(2 * INNER, SIZE), None) for _ in range(NUM_EXPERTS)]
        down = [backend.linear(self.random(SIZE, INNER), None) for _ in range(NUM_EXPERTS)]
        self.experts = backend.experts(ROUTER, gate_up, down, trace=trace)

    def random(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self.generator) / max(1, shape[-1]) ** 0.5
        return values.to(self.device, self.dtype)

    def dense(self, hidden: HiddenStates, cache: Tensor, context: Any) -> HiddenStates:
        add = self.backend.add
        hidden = add(hidden, self.project(self.attend(self.qkv(self.norms[0](hidden)), cache, context)))
        return add(hidden, self.down(self.gate_up(self.norms[1](hidden))))

    def sparse(self, hidden: HiddenStates) -> HiddenStates:
        x = self.norms[2](hidden)
        return self.backend.add(hidden, self.experts(x, self.router(x)))

    def model(self, token_ids: HiddenStates, caches: Any, context: Any) -> HiddenStates:
        hidden = self.sparse(self.dense(self.embed(token_ids), caches[0], context))
        return self.norms[0](self.dense(hidden, caches[1], context))


Compute = Callable[[HiddenStates, Any, Any], HiddenStates]


@dataclass
class Pass:
    """A pass of `compute` with a cache of two layers, whose first block no row uses."""

    backend: TorchBackend | CudaBackend
    compute: Compute
    tp: TensorParallelGroup | None = None
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        shape = (40, BLOCK_SIZE, 2, HEAD_DIM)
        layers = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
        self.cache = KVCache(layers, BLOCK_SIZE)
        rope = Rope(DefaultRope(10_000.0), HEAD_DIM, dtype=self.dtype, device=self.device)
        windows = frozenset({None, 5})
        self.forward = self.backend.compile(
            self.compute, rope=rope, windows=windows, device=self.device, tp=self.tp or SingleRankGroup()
        )

    @property
    def program(self) -> CudaProgram:
        assert isinstance(self.forward, RecordedForward)
        return cast(CudaProgram, self.forward.program(self.cache, size=None))

    def fill(self, seed: int = 5) -> Pass:
        for layer in self.cache.layers:
            layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(seed)))
        return self

    def run(self, batch: ForwardBatch, x: Tensor | None = None) -> Tensor:
        return self.forward(batch.token_ids if x is None else x, batch, self.cache).clone()


def cuda_pass(
    *,
    captures: bool,
    trace: ExpertTrace | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Pass:
    """A pass of the whole model."""
    backend = CudaBackend(dtype, captures=captures)
    model = Layers(backend, trace=trace, device=device, dtype=dtype, **options).model
    return Pass(backend, model, device=device, dtype=dtype)
