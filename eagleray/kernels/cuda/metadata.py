"""The numbers of a batch on the device: one int32 buffer at a fixed address, filled by one copy for each step.

Arrays lie behind each other in the buffer, at places that follow from their sizes alone (`MetadataSizes`). So a graph
that was captured for some sizes finds them in every later batch that is padded to these sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.cuda.adapter_tiles import AdapterTiles, max_tiles, tile_size, write_tiles
from eagleray.kernels.cuda.attention_work import MAX_SPLITS, SPLIT_KEYS, max_split_work, query_tiles, split_work
from eagleray.kernels.forward_batch import ForwardBatch, Int32Array

ALIGNMENT = 4
"""Numbers. Kernels load 16 bytes at a time from addresses that are multiples of 16."""

NUM_STAGING_BUFFERS = 4
"""Host buffers that are filled in turn. One is filled again after three more steps were begun, so its copy is done."""

MAX_NUMBERS = 8192
"""Largest `DeviceNumbers` that are copied together with a batch. Longer ones, as when rows with long lists of tokens
begin, are copied separately."""

NUM_LEADING_ARRAYS = 10
"""Arrays of a batch before those of its `SplitRule`s."""

NO_SLOT = -1
"""Slot of a padded token: nothing is cached."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """The division of the keys of rows with one query, the same in several layers. See `attention_work.split_work`."""

    window: int | None
    split_keys: int = SPLIT_KEYS

    def work(self, seq_lens: Int32Array) -> tuple[Int32Array, Int32Array]:
        return split_work(seq_lens, self.window, self.split_keys, MAX_SPLITS)

    def max_work(self, num_rows: int, num_positions: int) -> int:
        """Return the most work of `num_rows` rows of at most `num_positions` keys."""
        seen = num_positions if self.window is None else min(self.window, num_positions)
        return max_split_work(num_rows, seen, self.split_keys, MAX_SPLITS)


@dataclass(frozen=True)
class MetadataSizes:
    """Sizes of a batch's arrays, padding included."""

    num_tokens: int
    num_rows: int
    num_decodes: int
    """Rows with one query, padded rows included; they come first."""
    table_width: int
    """Blocks of a row in the block table."""
    num_tiles: int
    """Tiles of the other rows' queries, see `query_tiles`."""
    num_splits: tuple[int, ...]
    """Pieces of work of the rows with one query, for each `SplitRule` of the model."""
    num_adapter_slots: int = 0
    """Slots of the adapters that tokens may have; 0 for a batch in which none has one."""

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the arrays in order. The arrays of tokens come first: their places do not depend on the rows. The
        largest one is the last one."""
        tokens, rows, decodes = (self.num_tokens,), (self.num_rows,), (self.num_decodes,)
        num_tiles = max_tiles(self.num_tokens, self.num_adapter_slots) if self.num_adapter_slots else 0
        splits = [shape for length in self.num_splits for shape in ((1,), decodes, (length, 2))]
        return [
            *((1,), tokens, tokens, tokens),
            *((1,), (num_tiles,), (num_tiles, tile_size(self.num_tokens))),
            *(rows, (self.num_rows + 1,), (self.num_tiles, 2), *splits, (self.num_rows, self.table_width)),
        ]

    @cached_property
    def places(self) -> list[int]:
        """Place of each array, and the end of the last one."""
        lengths = [-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in self.shapes]
        return [0, *accumulate(lengths)]

    @property
    def length(self) -> int:
        return self.places[-1]

    def views(self, memory: Int32Array) -> list[Int32Array]:
        return [
            memory[place : place + math.prod(shape)].reshape(shape)
            for place, shape in zip(self.places, self.shapes, strict=False)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class SplitMetadata:
    """Work of the rows with one query in layers with one `SplitRule`, see `attention_work.split_work`."""

    num_work: Tensor
    row_starts: Tensor
    work: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMetadata:
    """Views of the device's buffer, int32."""

    sizes: MetadataSizes
    num_tokens: Tensor
    """[1] tokens that are no padding"""
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    adapter_tiles: AdapterTiles | None
    """None if no token of the batch has an adapter."""
    seq_lens: Tensor
    query_start_loc: Tensor
    tiles: Tensor
    splits: Sequence[SplitMetadata]
    """One entry for each `SplitRule` of the model."""
    block_table: Tensor

    @classmethod
    def of(cls, memory: Tensor, sizes: MetadataSizes) -> DeviceMetadata:
        views = [
            memory[place : place + math.prod(shape)].view(shape)
            for place, shape in zip(sizes.places, sizes.shapes, strict=False)
        ]
        splits = [SplitMetadata(*views[first : first + 3]) for first in range(NUM_LEADING_ARRAYS, len(views) - 1, 3)]
        num_tokens, token_ids, positions, slot_mapping, *of_adapters = views[:7]
        seq_lens, query_start_loc, tiles = views[7:NUM_LEADING_ARRAYS]
        return cls(
            sizes=sizes,
            num_tokens=num_tokens,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            adapter_tiles=AdapterTiles(*of_adapters) if sizes.num_adapter_slots else None,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            tiles=tiles,
            splits=splits,
            block_table=views[-1],
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostMetadata:
    """The numbers of a batch without padding, before their sizes are chosen."""

    batch: ForwardBatch
    tiles: Int32Array
    splits: Sequence[tuple[Int32Array, Int32Array]]
    """(work, row_starts) for each rule of the model"""
    num_adapter_slots: int
    """See `MetadataSizes`."""

    @classmethod
    def of(
        cls, batch: ForwardBatch, rules: Sequence[SplitRule], queries_per_tile: int, num_adapter_slots: int = 0
    ) -> HostMetadata:
        """`rules`: those of the model's layers. `queries_per_tile`: 0 in a model without attention.
        `num_adapter_slots`: those of the model."""
        tiles = np.empty((0, 2), np.int32)
        if batch.num_decodes < len(batch.seq_lens) and queries_per_tile:
            tiles = query_tiles(batch.query_start_loc, batch.seq_lens, queries_per_tile, batch.num_decodes)
        decodes = batch.seq_lens[: batch.num_decodes]
        splits = [rule.work(decodes) for rule in rules]
        return cls(batch, tiles, splits, 0 if batch.adapters is None else num_adapter_slots)

    def sizes(self, num_tokens: int) -> MetadataSizes:
        """Return the sizes of these numbers with the tokens padded to `num_tokens`."""
        num_rows, table_width = self.batch.block_table.shape
        return MetadataSizes(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_decodes=self.batch.num_decodes,
            table_width=table_width,
            num_tiles=len(self.tiles),
            num_splits=tuple(len(work) for work, _ in self.splits),
            num_adapter_slots=self.num_adapter_slots,
        )

    def write(self, memory: Int32Array, sizes: MetadataSizes) -> int:
        """Write the numbers to the beginning of `memory`, padded to `sizes`. Return how many of them are used: only
        unused rows of the block table lie behind them."""
        batch = self.batch
        num_tokens, token_ids, positions, slots, *others = sizes.views(memory)
        num_adapter_tiles, adapter_slots, adapter_tokens, seq_lens, starts, tiles, *splits, table = others
        num_tokens[0] = batch.num_tokens
        num_adapter_tiles[0] = 0
        if sizes.num_adapter_slots and batch.adapters is not None:
            num_adapter_tiles[0] = write_tiles(batch.adapters, adapter_slots, adapter_tokens)
        _fill(token_ids, batch.token_ids, 0)
        _fill(positions, batch.positions, 0)
        _fill(slots, batch.slot_mapping, NO_SLOT)
        _fill(seq_lens, batch.seq_lens, 0)
        _fill(starts, batch.query_start_loc, batch.num_tokens)
        tiles[: len(self.tiles)] = self.tiles
        tiles[len(self.tiles) :] = NO_SLOT
        for index, (work, row_starts) in enumerate(self.splits):
            num_work, all_starts, all_work = splits[3 * index : 3 * index + 3]
            num_work[0] = len(work)
            _fill(all_starts, row_starts, 0)
            all_work[: len(work)] = work
        num_rows, width = batch.block_table.shape
        table[:num_rows, :width] = batch.block_table
        return sizes.places[-2] + num_rows * sizes.table_width


def _fill(target: Int32Array, values: Int32Array, padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding


class MetadataBuffer:
    """The device's buffer of `capacity` numbers, and the host's buffers that are copied to it. The numbers of the
    worker end where those of the batch begin, so that one copy takes both."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.whole = torch.zeros(MAX_NUMBERS + capacity, dtype=torch.int32, device=device)
        self.memory = self.whole[MAX_NUMBERS:]
        is_cuda = device.type == "cuda"
        self._staging = [_StagingBuffer(len(self.whole), is_cuda=is_cuda) for _ in range(NUM_STAGING_BUFFERS)]
        self._turn = 0

    @staticmethod
    def num_bytes(capacity: int) -> int:
        """Return the bytes on the device."""
        return 4 * (MAX_NUMBERS + capacity)

    def upload(self, metadata: HostMetadata, sizes: MetadataSizes) -> None:
        """Begin to copy the numbers of a batch. The copy is ordered after all work that was launched before."""
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn]
        staging.wait_until_copied()
        numbers, first = metadata.batch.numbers, MAX_NUMBERS
        if len(numbers.array) <= MAX_NUMBERS:
            length = len(numbers.array)
            first -= -(-length // ALIGNMENT) * ALIGNMENT
            staging.array[first : first + length] = numbers.array
            numbers.tensor = self.whole[first : first + length]
        end = MAX_NUMBERS + metadata.write(staging.array[MAX_NUMBERS:], sizes)
        self.whole[first:end].copy_(staging.tensor[first:end], non_blocking=True)
        staging.note_copy()


class _StagingBuffer:
    """A host buffer, pinned if the device is a GPU, and the event behind its last copy."""

    def __init__(self, capacity: int, *, is_cuda: bool) -> None:
        self.tensor = torch.zeros(capacity, dtype=torch.int32, pin_memory=is_cuda)
        self.array: Int32Array = self.tensor.numpy()
        self._copied = torch.cuda.Event() if is_cuda else None

    def wait_until_copied(self) -> None:
        """Wait for the last copy, if there was one. It was begun some steps ago, so this is no wait as a rule."""
        if self._copied is not None:
            self._copied.synchronize()

    def note_copy(self) -> None:
        if self._copied is not None:
            self._copied.record()
