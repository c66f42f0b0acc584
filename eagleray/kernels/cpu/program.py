"""A recorded forward pass, ready to run: its ops as C structs, the buffers between them, and the tables they read."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.recording import HostOp, NativeOp, Recording, Value
from eagleray.kernels.forward_batch import ForwardBatch, Int32Array
from eagleray.kernels.rope import Rope
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.token_shards import token_shard

MIN_ROWS = 64
SINGLE_THREAD_SECONDS = 150e-6
"""Work that takes one thread less than this is not worth waking another."""
BYTES_PER_SECOND = 60e9
"""Rough memory bandwidth of one thread."""
OPERATIONS_PER_SECOND = 400e9
"""Rough arithmetic rate of one thread."""
EXPERT_TOKENS = 512
"""Tokens that go through the experts together, so few that intermediate results stay in the processor's cache."""


@dataclass
class _Segment:
    """Consecutive native ops on the same rows (this rank's token shard, or all), or one host op."""

    ops: Any
    count: int
    is_sequence_sharded: bool
    host: HostOp | None


class Program:
    """A pass that one thread runs. The native ops of a segment use up to `num_threads` threads."""

    def __init__(
        self,
        library: ctypes.CDLL,
        recording: Recording,
        *,
        source: Value | None,
        result: Value,
        dtype: torch.dtype,
        rope: Rope,
        num_threads: int,
        tp: TensorParallelGroup,
    ) -> None:
        """`source`: the value that stands for the input, if that is hidden states and not token ids."""
        recording.finish(result)
        self._library = library
        self._dtype = dtype
        self._rope = rope
        self._num_threads = num_threads
        self._tp = tp
        self._source = source
        self._result = result
        self._recording = recording  # owns the memory that the ops point to
        self._segments = _segments(recording)
        self._sizes = recording.buffers
        self._rows: list[Tensor] = []
        self._buffers = (abi.CBuffer * len(self._sizes))()
        self._capacity = -1  # tokens that there is room for
        self._attention_params = [op.args.params for op in _native(recording) if op.operation == abi.OP_ATTEND]
        self._mixes = [op.args for op in _native(recording) if op.operation == abi.OP_COMPUTE_EXPERTS]
        products = [op.args for op in _native(recording) if op.operation == abi.OP_MULTIPLY]
        self._num_weights = sum(product.n * product.k for product in products)
        self._num_weights += sum(3 * mix.router.top_k * mix.experts.hidden * mix.experts.inner for mix in self._mixes)
        self._batch = abi.CBatch()
        self._metadata = self._batch.metadata  # shares its memory
        self._tables = (torch.empty(0), torch.empty(0))
        self._max_context = 0
        self._scratch: list[Tensor] = []

    def run(self, x: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Compute a batch, from the hidden states `x` if given. Returns [num_tokens, features], which the next run
        overwrites."""
        num_tokens = batch.num_tokens
        if num_tokens > self._capacity:
            self._grow(num_tokens)
        max_context = int(batch.seq_lens.max(initial=0))
        if max_context > self._max_context:
            self._extend_tables(max_context)
        if x is not None:
            assert self._source is not None
            self._rows[self._source.buffer][:num_tokens, : x.shape[1]].copy_(x)
        self._set_batch(batch)
        run, kind = self._library.er_run, int(self._dtype == torch.bfloat16)
        threads = threads_for(self._num_weights, self._dtype, num_tokens, self._num_threads)
        num_own = len(token_shard(num_tokens, self._tp)) if self._tp.size > 1 else num_tokens
        for segment in self._segments:
            if segment.host is not None:
                segment.host.apply(*[self._view(value, num_tokens, num_own) for value in segment.host.rows])
                continue
            self._metadata.num_tokens = num_own if segment.is_sequence_sharded else num_tokens
            if self._metadata.num_tokens:
                run(kind, segment.ops, segment.count, self._buffers, self._batch, threads)
        return self._view(self._result, num_tokens, num_own)

    def _view(self, value: Value, num_tokens: int, num_own: int) -> Tensor:
        """Return the used part of the value's buffer: [num_tokens, features], or [num_own, features] of a shard."""
        return self._rows[value.buffer][: num_own if value.is_sequence_sharded else num_tokens, : value.size]

    def _set_batch(self, batch: ForwardBatch) -> None:
        metadata = self._metadata
        metadata.num_rows = len(batch.seq_lens)
        metadata.query_start_loc = _address(batch.query_start_loc)
        metadata.seq_lens = _address(batch.seq_lens)
        metadata.block_table = _address(batch.block_table)
        metadata.table_stride = batch.block_table.shape[1]
        metadata.positions = _address(batch.positions)
        metadata.slot_mapping = _address(batch.slot_mapping)
        self._batch.token_ids = _address(batch.token_ids)

    def _grow(self, num_tokens: int) -> None:
        """Enlarge all buffers for `num_tokens`."""
        self._capacity = max(MIN_ROWS, 1 << (num_tokens - 1).bit_length())
        for reserve in self._recording.reserve:
            reserve(self._capacity)
        self._rows = []  # freed before the new ones are allocated
        self._rows = [
            # an even width, because kernels read pairs: the last one ends with a zero
            torch.zeros((self._capacity, size + size % 2), dtype=torch.float32 if is_float else self._dtype)
            for size, is_float in self._sizes
        ]
        for buffer, rows in zip(self._buffers, self._rows, strict=True):
            buffer.memory, buffer.stride = rows.data_ptr(), rows.shape[1]
        self._make_scratch()

    def _extend_tables(self, max_context: int) -> None:
        """Extend the table of rotations to contexts of `max_context` tokens."""
        self._max_context = max(MIN_ROWS, 1 << (max_context - 1).bit_length())
        cos, sin = self._rope.table(torch.arange(self._max_context))
        self._tables = cos.contiguous(), sin.contiguous()
        self._batch.cos, self._batch.sin = (table.data_ptr() for table in self._tables)
        self._make_scratch()

    def _make_scratch(self) -> None:
        library, kind = self._library, int(self._dtype == torch.bfloat16)
        attention = [
            library.er_attention_scratch_size(params, self._max_context, self._num_threads)
            for params in self._attention_params
        ]
        tokens = min(EXPERT_TOKENS, self._capacity)
        experts = [library.er_experts_scratch_size(mix.experts, mix.router.top_k, tokens, kind) for mix in self._mixes]
        top_k = max((mix.router.top_k for mix in self._mixes), default=0)
        sizes = [max(attention, default=0), max(experts, default=0), 4 * self._capacity * top_k]
        self._scratch = [torch.zeros(-(-size // 8) + 8, dtype=torch.int64) for size in sizes]
        batch = self._batch
        batch.attention_scratch, batch.expert_scratch, batch.expert_ids = map(aligned, self._scratch)
        batch.expert_tokens = tokens


def threads_for(num_weights: int, dtype: torch.dtype, num_rows: int, num_threads: int) -> int:
    """Return the number of threads, at most `num_threads`, that multiply `num_rows` with `num_weights` fastest."""
    seconds = num_weights * max(dtype.itemsize / BYTES_PER_SECOND, 2 * num_rows / OPERATIONS_PER_SECOND)
    return 1 if seconds < SINGLE_THREAD_SECONDS else num_threads


def _native(recording: Recording) -> list[NativeOp]:
    return [op for op in recording.ops if isinstance(op, NativeOp)]


def _segments(recording: Recording) -> list[_Segment]:
    """Cut the ops into segments, each of which one native call or one Python call computes."""
    segments: list[_Segment] = []
    pending: list[NativeOp] = []

    def close() -> None:
        if pending:
            entries = [abi.COp(op.operation, ctypes.addressof(op.args)) for op in pending]
            segments.append(
                _Segment((abi.COp * len(entries))(*entries), len(entries), pending[0].is_sequence_sharded, None)
            )
            pending.clear()

    for op in recording.ops:
        if isinstance(op, HostOp):
            close()
            segments.append(_Segment(None, 0, False, op))
            continue
        if pending and pending[0].is_sequence_sharded != op.is_sequence_sharded:
            close()
        pending.append(op)
    close()
    return segments


def _address(array: Int32Array) -> int:
    assert array.flags.c_contiguous and array.dtype == np.int32
    return torch.from_numpy(array).data_ptr()  # takes two thirds of the time of `array.ctypes.data`


def aligned(memory: Tensor) -> int:
    """Return the first address in `memory` that is a multiple of 64."""
    return -(-memory.data_ptr() // 64) * 64
