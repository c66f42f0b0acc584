"""A recorded forward pass, ready to run: its ops as C structs, the buffers between them, and the tables they read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.cpu.decode import NativeDecoder
from eagleray.kernels.cpu.experts import EXPERT_TOKENS, aligned
from eagleray.kernels.cpu.linear import NativeLinear, threads_for, weight_bits
from eagleray.kernels.cpu.mla import MLA_TOKENS, latents_bytes, num_weights
from eagleray.kernels.decode_table import DecodeTable
from eagleray.kernels.forward_batch import ForwardBatch, Int32Array, PassLimits, power_of_two
from eagleray.kernels.kv_cache import HUGE_PAGE_BYTES, host_zeros
from eagleray.kernels.recording import Access, Buffers, LinearWeight, Recording, Value
from eagleray.kernels.recording_backend import Program
from eagleray.kernels.rope import Rope
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.token_shards import token_shard

MIN_ROWS = 64


@dataclass(frozen=True, slots=True)
class NativeOp:
    """An operation of the kernels. `args` is its struct of `abi`; `reads` and `writes` are the values of those fields
    of `args` that name buffers. If `total` is given, the op adds its result to this value, in its buffer."""

    operation: int
    args: CStruct
    reads: dict[str, Value]
    writes: dict[str, Value]
    total: Value | None = None

    @property
    def access(self) -> Access:
        reads, writes = tuple(self.reads.values()), tuple(self.writes.values())
        if self.total is None:
            return Access(reads, writes)
        (out,) = writes
        return Access((*reads, self.total), writes, {out: self.total})

    @property
    def is_sequence_sharded(self) -> bool:
        return next(iter(self.writes.values())).is_sequence_sharded


@dataclass(frozen=True, slots=True)
class HostCall:
    """An operation in Python. `apply` takes the tensors of `values` and overwrites the last one, which is in the buffer
    of `consumed` if that is given."""

    apply: Callable[..., None]
    values: Sequence[Value]
    consumed: Value | None = None

    @property
    def access(self) -> Access:
        *reads, out = self.values
        if self.consumed is None:
            return Access(reads, (out,))
        return Access((*reads, self.consumed), (out,), {out: self.consumed})


@dataclass(frozen=True, slots=True)
class LoweredOps:
    """The ops of a pass, which hold the numbers of their buffers."""

    recording: Recording
    """Owner of the memory that the ops point to."""
    ops: Sequence[NativeOp | HostCall]
    buffers: Buffers
    reserve: Sequence[Callable[[int], None]]
    """Callbacks that grow memory; called with the token count before a pass larger than every earlier one."""


@dataclass
class _Segment:
    """Consecutive native ops on the same rows (this rank's token shard, or all), or one host op."""

    ops: Any
    count: int
    is_sequence_sharded: bool
    host: HostCall | None


class CpuProgram(Program):
    """A pass that one thread runs. The native ops of a segment use up to `num_threads` threads."""

    def __init__(
        self,
        library: ctypes.CDLL,
        lowered: LoweredOps,
        *,
        rope: Rope,
        num_threads: int,
        tp: TensorParallelGroup,
    ) -> None:
        self.ops = lowered.ops
        self._lowered = lowered
        self._library = library
        self._dtype = lowered.recording.dtype
        self._rope = rope
        self._num_threads = num_threads
        self._tp = tp
        self._source = lowered.recording.source
        self._result = lowered.recording.result
        self._numbers = lowered.buffers.numbers
        self._segments = _segments(lowered.ops)
        self._rows: list[Tensor] = []
        self._buffers = (abi.CBuffer * len(lowered.buffers.shapes))()
        self._capacity = -1  # tokens that there is room for
        self._attention_params = [op.args.params for op in _native(lowered.ops) if op.operation == abi.OP_ATTEND]
        self._mla_params = [op.args.params for op in _native(lowered.ops) if op.operation == abi.OP_ATTEND_MLA]
        self._mixes = [op.args for op in _native(lowered.ops) if op.operation == abi.OP_COMPUTE_EXPERTS]
        products = [op.args for op in _native(lowered.ops) if op.operation == abi.OP_MULTIPLY]
        experts = [(mix.router.top_k * mix.experts.hidden * mix.experts.inner, mix.experts) for mix in self._mixes]
        weights = [
            *((product.n * product.k, product.grouping) for product in products),
            *((2 * size, one.gate_up_grouping) for size, one in experts),
            *((size, one.down_grouping) for size, one in experts),
            *((num_weights(params), None) for params in self._mla_params),
        ]
        self._num_weights = sum(size for size, _ in weights)
        self._num_bytes = sum(size * weight_bits(self._dtype, grouping) // 8 for size, grouping in weights)
        self._adapted = [args for args in products if args.adapters]
        self._batch = abi.CBatch()
        self._metadata = self._batch.metadata  # shares its memory
        self._tables = (torch.empty(0), torch.empty(0))
        self._max_context = 0
        self._scratch: list[Tensor] = []
        # the pass from token ids to hidden states of this rank alone
        self._is_one_call = self._source is None and tp.size == 1 and [one.host for one in self._segments] == [None]
        self._decoder: NativeDecoder | None = None

    def num_bytes(self, limits: PassLimits) -> int:
        capacity, positions = _with_room(limits.num_tokens), _with_room(limits.num_positions)
        rows = sum(rows * width * dtype.itemsize for (rows, width), dtype in self._row_shapes(capacity))
        rotated = [params.head_dim for params in self._attention_params]
        rotated += [params.rotated_dim for params in self._mla_params]
        rotations = 4 * positions * max(rotated, default=0)  # a cosine and a sine for each pair
        return rows + sum(self._scratch_bytes(capacity, positions)) + rotations

    def reserve(self, limits: PassLimits) -> None:
        if limits.num_tokens > self._capacity:
            self._grow(limits.num_tokens)
        if limits.num_positions > self._max_context:
            self._extend_tables(limits.num_positions)

    def warm_up(self, limits: PassLimits, last_tokens: Tensor | None) -> None:
        """Do nothing: memory that is allocated in advance has no pages before it is written to."""

    def run(self, x: Tensor | None, batch: ForwardBatch) -> Tensor:
        num_tokens = batch.num_tokens
        if num_tokens > self._capacity:
            self._grow(num_tokens)
        max_context = int(batch.seq_lens.max(initial=0))
        if max_context > self._max_context:
            self._extend_tables(max_context)
        if x is not None:
            assert self._source is not None
            self._rows[self._numbers[self._source]][:num_tokens, : x.shape[1]].copy_(x)
        self._set_batch(batch)
        run, kind = self._library.er_run, int(self._dtype == torch.bfloat16)
        threads = self._threads(num_tokens)
        num_own = len(token_shard(num_tokens, self._tp)) if self._tp.size > 1 else num_tokens
        for segment in self._segments:
            if segment.host is not None:
                segment.host.apply(*[self._view(value, num_tokens, num_own) for value in segment.host.values])
                continue
            self._metadata.num_tokens = num_own if segment.is_sequence_sharded else num_tokens
            if self._metadata.num_tokens:
                run(kind, segment.ops, segment.count, self._buffers, self._batch, threads)
        return self._view(self._result, num_tokens, num_own)

    def decode(self, rows: Sequence[int], head: LinearWeight, table: DecodeTable) -> list[int] | None:
        if not self._is_one_call:
            return None
        if len(rows) > self._capacity:
            self._grow(len(rows))
        decoder = self._decoder
        if decoder is None or decoder.head is not head or decoder.table is not table:
            self._decoder = decoder = self._make_decoder(head, table)
        return decoder.decode(rows, self._max_context)

    def _make_decoder(self, head: LinearWeight, table: DecodeTable) -> NativeDecoder:
        assert isinstance(head, NativeLinear)
        (segment,) = self._segments
        step = abi.CDecode(
            dtype=int(self._dtype == torch.bfloat16),
            ops=segment.ops,
            num_ops=segment.count,
            buffers=self._buffers,
            batch=ctypes.pointer(self._batch),
            hidden=self._numbers[self._result],
        )
        return NativeDecoder(
            self._library, step, head, table, pass_threads=self._threads, num_threads=self._num_threads
        )

    def _threads(self, num_tokens: int) -> int:
        return threads_for(self._num_weights, self._num_bytes, num_tokens, self._num_threads)

    def _view(self, value: Value, num_tokens: int, num_own: int) -> Tensor:
        """Return the used part of the value's buffer: [num_tokens, features], or [num_own, features] of a shard."""
        rows = self._rows[self._numbers[value]][: num_own if value.is_sequence_sharded else num_tokens]
        return rows if rows.shape[1] == value.size else rows[:, : value.size]

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
        adapters = batch.adapters if self._adapted else None
        self._batch.num_adapter_groups = 0 if adapters is None else len(adapters.slots)
        if adapters is not None:
            self._batch.adapter_slots = _address(adapters.slots)
            self._batch.adapter_offsets = _address(adapters.offsets)
            self._batch.adapter_tokens = _address(adapters.tokens)

    def _grow(self, num_tokens: int) -> None:
        """Enlarge all buffers for `num_tokens`."""
        self._capacity = _with_room(num_tokens)
        for reserve in self._lowered.reserve:
            reserve(self._capacity)
        self._rows = []  # freed before the new ones are allocated
        self._rows = [_zeros(shape, dtype) for shape, dtype in self._row_shapes(self._capacity)]
        for buffer, rows in zip(self._buffers, self._rows, strict=True):
            buffer.memory, buffer.stride = rows.data_ptr(), rows.shape[1]
        self._make_scratch()

    def _extend_tables(self, max_context: int) -> None:
        """Extend the table of rotations to contexts of `max_context` tokens."""
        self._max_context = _with_room(max_context)
        cos, sin = self._rope.table(torch.arange(self._max_context))
        self._tables = cos.contiguous(), sin.contiguous()
        self._batch.cos, self._batch.sin = (table.data_ptr() for table in self._tables)
        self._make_scratch()

    def _row_shapes(self, capacity: int) -> list[tuple[tuple[int, int], torch.dtype]]:
        """Return shape and dtype of each buffer."""
        # an even width, because kernels read pairs: the last one ends with a zero
        return [
            ((capacity, shape.size + shape.size % 2), shape.dtype(self._dtype))
            for shape in self._lowered.buffers.shapes
        ]

    def _make_scratch(self) -> None:
        sizes = self._scratch_bytes(self._capacity, self._max_context)
        self._scratch = [torch.zeros(-(-size // 8) + 8, dtype=torch.int64) for size in sizes]
        batch = self._batch
        attention, latents, *addresses = map(aligned, self._scratch)
        batch.attention_scratch = attention
        tokens = min(MLA_TOKENS, self._capacity)
        batch.mla_scratch = abi.CMLAScratch(splits=attention, latents=latents, max_tokens=tokens)
        batch.expert_scratch, batch.expert_ids, batch.adapter_scratch = addresses
        batch.expert_tokens = min(EXPERT_TOKENS, self._capacity)

    def _scratch_bytes(self, capacity: int, max_context: int) -> tuple[int, int, int, int, int]:
        """Return the bytes of the working memory of attention, of latents in it, of experts, of their ids, and of
        adapters."""
        library, kind = self._library, int(self._dtype == torch.bfloat16)
        attention = [
            library.er_attention_scratch_size(params, max_context, self._num_threads)
            for params in self._attention_params
        ]
        attention += [
            library.er_mla_scratch_size(params, max_context, self._num_threads) for params in self._mla_params
        ]
        latents = [latents_bytes(params, min(MLA_TOKENS, capacity), self._dtype) for params in self._mla_params]
        tokens = min(EXPERT_TOKENS, capacity)
        experts = [library.er_experts_scratch_size(mix.experts, mix.router.top_k, tokens, kind) for mix in self._mixes]
        top_k = max((mix.router.top_k for mix in self._mixes), default=0)
        adapters = [library.er_adapter_scratch_size(args, capacity) for args in self._adapted]
        return (
            max(attention, default=0),
            max(latents, default=0),
            max(experts, default=0),
            4 * capacity * top_k,
            max(adapters, default=0),
        )


def _zeros(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return zeros, in huge pages if they are large: the first prompt of an engine writes to all of them."""
    is_large = shape[0] * shape[1] * dtype.itemsize >= HUGE_PAGE_BYTES
    return host_zeros(shape, dtype) if is_large else torch.zeros(shape, dtype=dtype)


def _with_room(number: int) -> int:
    """Return the room for a number of tokens or positions: some more, so that it seldom grows."""
    return max(MIN_ROWS, power_of_two(number))


def _native(ops: Sequence[NativeOp | HostCall]) -> list[NativeOp]:
    return [op for op in ops if isinstance(op, NativeOp)]


def _segments(ops: Sequence[NativeOp | HostCall]) -> list[_Segment]:
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

    for op in ops:
        if isinstance(op, HostCall):
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
