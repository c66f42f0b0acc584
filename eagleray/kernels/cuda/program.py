"""A recorded forward pass as launches on buffers at fixed addresses, in one of three modes.

- Batches in which every row has one query, as in decoding, run as one captured graph for each bucket of rows.
- Other small batches run as graphs of what lies between attentions, for each bucket of tokens.
- Larger batches run as a plain list of launches.

Batches are padded to their bucket. If products have adapters, a batch in which a token has one runs other graphs than
the rest, for fewer buckets. The memory of a pass belongs to the program: buffers of the most rows, of which
smaller batches use the first rows, working memory that launches share, and the metadata of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.cuda.graphs import CallCapture, CudaGraphCapture, GraphCapture
from eagleray.kernels.cuda.launch import (
    ALIGNED_BYTES,
    Frame,
    Launch,
    LaunchKind,
    LoweredLaunches,
    TensorSpec,
    view_bytes,
)
from eagleray.kernels.cuda.metadata import DeviceMetadata, HostMetadata, MetadataBuffer, MetadataSizes, SplitRule
from eagleray.kernels.forward_batch import ForwardBatch, PassLimits
from eagleray.kernels.recording_backend import Program
from eagleray.kernels.rope import Rope
from eagleray.log import get_logger
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.token_shards import token_shard

logger = get_logger(__name__)

DECODE_BUCKETS = (1, 2, 4, *range(8, 257, 8))
"""Numbers of rows of captured graphs for batches in which each row has one query."""

TOKEN_BUCKETS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens of the captured graphs between attentions. Beyond them a launch takes less time than its kernel."""

MIN_TOKENS = 64
MIN_ROWS = 16
MIN_POSITIONS = 256

PIECE_CUTS = frozenset({LaunchKind.ATTENTION, LaunchKind.HOST})
DECODE_CUTS = frozenset({LaunchKind.HOST})

Segment = Callable[[Frame], None]
"""A part of a plan: the repetition of captured launches, or a launch that takes the tensors of the current batch."""


def buckets_of(buckets: Sequence[int], num_adapter_slots: int) -> Sequence[int]:
    """Return the buckets that have graphs: for batches with adapters the powers of two among them."""
    return [bucket for bucket in buckets if bucket & (bucket - 1) == 0] if num_adapter_slots else buckets


def bucket_of(number: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket that has room for `number`, or None."""
    return next((bucket for bucket in buckets if bucket >= number), None)


def in_buckets(limits: PassLimits, num_adapter_slots: int = 0) -> PassLimits:
    """Return limits that have room for the buckets of these, too; those with graphs for adapters are among the rest."""
    return PassLimits(
        bucket_of(limits.num_tokens, buckets_of(TOKEN_BUCKETS, num_adapter_slots)) or limits.num_tokens,
        bucket_of(limits.num_rows, buckets_of(DECODE_BUCKETS, num_adapter_slots)) or limits.num_rows,
        limits.num_positions,
    )


@dataclass(frozen=True)
class MemoryPlan:
    """The sizes of a program's memory for batches within some limits."""

    lowered: LoweredLaunches
    limits: PassLimits
    block_size: int
    tp_size: int

    @property
    def table_width(self) -> int:
        return -(-self.limits.num_positions // self.block_size)

    def decode_sizes(self, num_rows: int, num_adapter_slots: int) -> MetadataSizes:
        """Return the sizes of a batch of rows with one query each, whatever their lengths are."""
        return MetadataSizes(
            num_tokens=num_rows,
            num_rows=num_rows,
            num_decodes=num_rows,
            table_width=self.table_width,
            num_tiles=0,
            num_splits=tuple(rule.max_work(num_rows, self.limits.num_positions) for rule in self.lowered.split_rules),
            num_adapter_slots=num_adapter_slots,
        )

    @cached_property
    def sizes(self) -> MetadataSizes:
        """The largest size of each array."""
        limits, in_tile = self.limits, self.lowered.queries_per_tile
        decodes = self.decode_sizes(limits.num_rows, self.lowered.num_adapter_slots)
        return MetadataSizes(
            num_tokens=max(limits.num_tokens, limits.num_rows),
            num_rows=limits.num_rows,
            num_decodes=limits.num_rows,
            table_width=decodes.table_width,
            num_tiles=limits.num_rows + limits.num_tokens // in_tile if in_tile else 0,
            num_splits=decodes.num_splits,
            num_adapter_slots=decodes.num_adapter_slots,
        )

    @cached_property
    def buffer_places(self) -> list[int]:
        """Byte at which each buffer begins, and the end of the last one."""
        places = [0]
        for spec in self.buffer_specs(self.sizes.num_tokens):
            places.append(places[-1] + spec.num_bytes)
        return places

    def buffer_specs(self, num_rows: int) -> list[TensorSpec]:
        """Return the part of each buffer that belongs to the first rows."""
        dtype = self.lowered.recording.dtype
        return [TensorSpec((num_rows, shape.size), shape.dtype(dtype)) for shape in self.lowered.buffers.shapes]

    @cached_property
    def scratch_bytes(self) -> int:
        scratch = (sum(spec.num_bytes for spec in launch.scratch(self.sizes)) for launch in self.lowered.launches)
        return max(scratch, default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, apart from the gaps between allocations."""
        rotations = 2 * 4 * self.limits.num_positions * self.lowered.num_rotated
        return self.buffer_places[-1] + self.scratch_bytes + MetadataBuffer.num_bytes(self.sizes.length) + rotations


def _no_batch(rules: Sequence[SplitRule], query_start_loc: Sequence[int] = (0,)) -> HostMetadata:
    """Return the numbers of a batch of padding alone. `query_start_loc`: the padded tokens of padded rows."""
    nothing = np.empty(0, np.int32)
    batch = ForwardBatch(
        token_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        block_table=np.empty((0, 0), np.int32),
        seq_lens=nothing,
        query_start_loc=np.array(query_start_loc, np.int32),
        num_decodes=0,
    )
    return HostMetadata.of(batch, rules, 0)


class _PassMemory:
    """The memory of a program."""

    def __init__(self, plan: MemoryPlan, rope: Rope, device: torch.device) -> None:
        self.plan = plan
        # zeros, because padded rows are computed before anything was written to them, and NaN takes some CPUs longer
        self.buffers = torch.zeros(plan.buffer_places[-1] + ALIGNED_BYTES, dtype=torch.uint8, device=device)
        self.scratch = torch.zeros(plan.scratch_bytes + ALIGNED_BYTES, dtype=torch.uint8, device=device)
        self.metadata = MetadataBuffer(plan.sizes.length, device)
        self.cos = self.sin = torch.empty(0, device=device)
        if plan.lowered.num_rotated:
            cos, sin = rope.table(torch.arange(plan.limits.num_positions, device=device))
            self.cos, self.sin = cos.contiguous(), sin.contiguous()

    def rows(self, num_rows: int) -> list[Tensor]:
        """Return the first rows of each buffer."""
        specs, places = self.plan.buffer_specs(num_rows), self.plan.buffer_places
        return [view_bytes(self.buffers, place, spec) for place, spec in zip(places, specs, strict=False)]


class CudaProgram(Program):
    """See `Program`. `device` may be a CPU, on which Triton interprets the kernels: then a graph is the list of its
    launches."""

    def __init__(
        self,
        lowered: LoweredLaunches,
        *,
        rope: Rope,
        device: torch.device,
        tp: TensorParallelGroup,
        block_size: int,
        captures: bool,
    ) -> None:
        """`captures`: use graphs, with padding to buckets, where they serve; else every batch is a plain list."""
        self._lowered = lowered
        self._rope = rope
        self._device = device
        self._tp = tp
        self._block_size = block_size
        self._captures = captures
        self._capture: GraphCapture = CudaGraphCapture() if device.type == "cuda" else CallCapture()
        self._limits = PassLimits(MIN_TOKENS, MIN_ROWS, MIN_POSITIONS)
        self._memory: _PassMemory | None = None
        self._no_last_tokens = torch.zeros(1, dtype=torch.int64, device=device)
        self._last_tokens = self._no_last_tokens
        # by bucket and number of adapter slots: that of the model, or 0 for batches without adapters
        self._decode_plans: dict[tuple[int, int], tuple[Frame, list[Segment]]] = {}
        self._piece_plans: dict[tuple[int, int], tuple[Frame, list[Segment]]] = {}

    def num_bytes(self, limits: PassLimits) -> int:
        """See `Program`. What captured graphs take is not included."""
        return self._plan(in_buckets(limits, self._lowered.num_adapter_slots)).num_bytes

    def reserve(self, limits: PassLimits) -> None:
        """See `Program`. Larger batches make the memory grow, and captured graphs are lost."""
        limits = in_buckets(limits, self._lowered.num_adapter_slots)
        if self._memory is not None and self._limits.covers(limits):
            return
        self._limits = limits
        self._drop_graphs()
        self._memory = None  # freed before the new one is allocated
        for reserve in self._lowered.reserve:
            reserve(self._plan(limits).sizes.num_tokens)
        self._memory = _PassMemory(self._plan(limits), self._rope, self._device)

    def warm_up(self, limits: PassLimits, last_tokens: Tensor | None) -> None:
        started = time.monotonic()
        self.reserve(limits)
        self._set_last_tokens(last_tokens)  # of another dtype than the tensor that stands for none
        self._compile()
        num_graphs = self.capture(last_tokens) if self._captures else 0
        logger.info("compiled the kernels and captured %d graphs in %.1f s", num_graphs, time.monotonic() - started)

    def _compile(self) -> None:
        """Run every launch but Python functions on padding alone, in the sizes of plain lists up to the largest one: a
        launch chooses among its kernels by the number of tokens."""
        num_tokens, largest = min(MIN_TOKENS, self._limits.num_tokens), self._limits.num_tokens
        while True:
            for num_adapter_slots in self._variants():
                self._run_on_padding(num_tokens, num_adapter_slots)
            if num_tokens == largest:
                return
            num_tokens = min(2 * num_tokens, largest)

    def _run_on_padding(self, num_tokens: int, num_adapter_slots: int) -> None:
        memory = self._memory
        assert memory is not None
        rules = self._lowered.split_rules
        num_tiles = 1 if self._lowered.queries_per_tile else 0
        # a row with one query and, if there is room for it, one with several: they have kernels of their own
        starts = [0, 1, num_tokens][: self._limits.num_rows + 1]
        num_rows = len(starts) - 1
        splits = tuple(1 for _ in rules)
        sizes = MetadataSizes(num_tokens, num_rows, 1, memory.plan.table_width, num_tiles, splits, num_adapter_slots)
        frame = self._frame(sizes)
        frame.num_tokens = starts[-1]
        memory.metadata.upload(_no_batch(rules, starts), sizes)
        for launch in self._lowered.launches:
            if launch.kind is not LaunchKind.HOST:
                launch.run(frame)

    def capture(self, last_tokens: Tensor | None = None) -> int:
        """Capture all graphs within the reserved limits, and return their number of buckets. `last_tokens` must be that
        of all later batches."""
        self._set_last_tokens(last_tokens)
        num_buckets = 0
        for slots in self._variants():
            decodes = [bucket for bucket in buckets_of(DECODE_BUCKETS, slots) if bucket <= self._limits.num_rows]
            tokens = [bucket for bucket in buckets_of(TOKEN_BUCKETS, slots) if bucket <= self._limits.num_tokens]
            for bucket in reversed(decodes):  # the largest first: the others find its temporary memory free
                self._decode_plan(bucket, slots)
            for bucket in reversed(tokens):
                self._piece_plan(bucket, slots)
            num_buckets += len(decodes) + len(tokens)
        return num_buckets

    def run(self, x: Tensor | None, batch: ForwardBatch) -> Tensor:
        memory = self._fit(batch)
        self._set_last_tokens(batch.last_tokens)
        lowered = self._lowered
        metadata = HostMetadata.of(batch, lowered.split_rules, lowered.queries_per_tile, lowered.num_adapter_slots)
        frame, segments = self._choose(batch, metadata)
        memory.metadata.upload(metadata, frame.metadata.sizes)
        frame.num_tokens = batch.num_tokens
        frame.num_own_tokens = len(token_shard(batch.num_tokens, self._tp))
        if x is not None:
            assert self._lowered.recording.source is not None
            frame.without_padding(self._lowered.recording.source).copy_(x)
        for segment in segments:
            segment(frame)
        return frame.without_padding(self._lowered.recording.result)

    def _choose(self, batch: ForwardBatch, metadata: HostMetadata) -> tuple[Frame, Sequence[Segment]]:
        """Return the tensors for a batch, and the segments to run on them."""
        num_tokens, num_rows, slots = batch.num_tokens, len(batch.seq_lens), metadata.num_adapter_slots
        if num_tokens == 0:
            calls = [launch for launch in self._lowered.launches if launch.kind is LaunchKind.HOST]
            return self._frame(metadata.sizes(0)), [launch.run for launch in calls]
        if self._captures and batch.num_decodes == num_rows == num_tokens:
            bucket = bucket_of(num_rows, buckets_of(DECODE_BUCKETS, slots))
            if bucket is not None and bucket <= self._limits.num_rows:
                return self._decode_plan(bucket, slots)
        if self._captures:
            bucket = bucket_of(num_tokens, buckets_of(TOKEN_BUCKETS, slots))
            if bucket is not None and bucket <= self._limits.num_tokens:
                _, segments = self._piece_plan(bucket, slots)
                return self._frame(metadata.sizes(bucket)), segments
        return self._frame(metadata.sizes(num_tokens)), [launch.run for launch in self._lowered.launches]

    def _decode_plan(self, num_rows: int, num_adapter_slots: int) -> tuple[Frame, list[Segment]]:
        key = num_rows, num_adapter_slots
        if key not in self._decode_plans:
            frame = self._frame(self._plan(self._limits).decode_sizes(*key))
            self._decode_plans[key] = frame, list(self._captured(frame, DECODE_CUTS))
        return self._decode_plans[key]

    def _piece_plan(self, num_tokens: int, num_adapter_slots: int) -> tuple[Frame, list[Segment]]:
        """Return graphs for batches of any rows: they read the metadata of tokens alone, whose places are the same."""
        key = num_tokens, num_adapter_slots
        if key not in self._piece_plans:
            no_splits = tuple(0 for _ in self._lowered.split_rules)
            frame = self._frame(MetadataSizes(num_tokens, 0, 0, 0, 0, no_splits, num_adapter_slots))
            self._piece_plans[key] = frame, list(self._captured(frame, PIECE_CUTS))
        return self._piece_plans[key]

    def _variants(self) -> Sequence[int]:
        """Return the numbers of adapter slots for which there are graphs."""
        return [0, self._lowered.num_adapter_slots] if self._lowered.num_adapter_slots else [0]

    def _captured(self, frame: Frame, cuts: frozenset[LaunchKind]) -> Iterator[Segment]:
        """Yield the segments of the pass on `frame`: runs of captured launches, and single launches at the cuts."""
        assert self._memory is not None
        # captured launches run once before: on padding alone, for which nothing is cached or counted
        self._memory.metadata.upload(_no_batch(self._lowered.split_rules), frame.metadata.sizes)
        pending: list[Launch] = []
        for launch in self._lowered.launches:
            if launch.kind not in cuts:
                pending.append(launch)
                continue
            if pending:
                yield self._captured_together(pending, frame)
                pending = []
            yield launch.run
        if pending:
            yield self._captured_together(pending, frame)

    def _captured_together(self, launches: Sequence[Launch], frame: Frame) -> Segment:
        def run() -> None:
            for launch in launches:
                launch.run(frame)

        replay = self._capture.capture(run)
        return lambda _: replay()

    def _frame(self, sizes: MetadataSizes) -> Frame:
        memory = self._memory
        assert memory is not None
        num_own = -(-sizes.num_tokens // self._tp.size)
        rows = memory.rows(sizes.num_tokens)
        return Frame(
            metadata=DeviceMetadata.of(memory.metadata.memory, sizes),
            cos=memory.cos,
            sin=memory.sin,
            last_tokens=self._last_tokens,
            _numbers=self._lowered.buffers.numbers,
            _rows=rows,
            _sharded_rows=rows if num_own == sizes.num_tokens else [part[:num_own] for part in rows],
            _scratch=memory.scratch,
        )

    def _fit(self, batch: ForwardBatch) -> _PassMemory:
        """Return memory that has room for the batch."""
        num_rows, table_width = batch.block_table.shape
        # the last block of a row may be used in part
        positions = max(int(batch.seq_lens.max(initial=0)), (table_width - 1) * self._block_size + 1)
        needed = PassLimits(batch.num_tokens, num_rows, positions)
        if self._memory is None or not self._limits.covers(needed):
            self.reserve(self._limits.grown_to(needed))
        assert self._memory is not None
        return self._memory

    def _set_last_tokens(self, last_tokens: Tensor | None) -> None:
        """Have launches read this tensor. Graphs that read another one are lost."""
        tensor = self._no_last_tokens if last_tokens is None else last_tokens
        if tensor.data_ptr() != self._last_tokens.data_ptr():
            self._drop_graphs()
        self._last_tokens = tensor

    def _drop_graphs(self) -> None:
        self._decode_plans.clear()
        self._piece_plans.clear()
        self._capture.renew()

    def _plan(self, limits: PassLimits) -> MemoryPlan:
        return MemoryPlan(self._lowered, limits, self._block_size, self._tp.size)
