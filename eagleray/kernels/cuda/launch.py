"""The launches of a lowered pass, and the tensors that they work on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from eagleray.kernels.cuda.metadata import DeviceMetadata, MetadataSizes, SplitRule
from eagleray.kernels.recording import Access, Buffers, Recording, Value


class LaunchKind(Enum):
    """The part of a launch in the capture of graphs."""

    ROWS = auto()
    """Computes rows that do not depend on each other, padded ones included; captured."""
    ATTENTION = auto()
    """Depends on the rows of the batch: captured only for batches in which each row has one query."""
    HOST = auto()
    """Calls Python functions: never captured, and not for padded rows."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor and of the gap behind it."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES


ALIGNED_BYTES = 256
"""Alignment of tensors within a buffer, the same as in torch's allocator."""


def _no_scratch(sizes: MetadataSizes) -> Sequence[TensorSpec]:
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A sequence of kernel launches, made by `function(frame, *scratch)`."""

    function: Callable[..., None]
    access: Access
    kind: LaunchKind = LaunchKind.ROWS
    scratch: Callable[[MetadataSizes], Sequence[TensorSpec]] = _no_scratch
    """Working memory for a batch, which all launches share. Larger sizes never take less."""

    def run(self, frame: Frame) -> None:
        self.function(frame, *frame.scratch(self.scratch(frame.metadata.sizes)))


@dataclass(frozen=True, slots=True, eq=False)
class LoweredLaunches:
    """The launches of a recording, and the buffers of its values."""

    recording: Recording
    launches: Sequence[Launch]
    buffers: Buffers
    split_rules: Sequence[SplitRule]
    """Rules of the layers, in the order of `DeviceMetadata.splits`."""
    queries_per_tile: int
    """See `query_tiles`; 0 without attention."""
    num_rotated: int
    """Pairs of features of a head that launches rotate; 0 without attention."""
    num_adapter_slots: int = 0
    """Slots of the adapters that tokens may have; 0 if no product has adapters."""
    reserve: Sequence[Callable[[int], None]] = ()
    """Callbacks that grow memory outside of the program; called with the most tokens of a batch."""


@dataclass(slots=True, eq=False)
class Frame:
    """The tensors of a pass for batches of some size. Rows are padded."""

    metadata: DeviceMetadata
    cos: Tensor
    sin: Tensor
    """float32 [positions, half of the rotated features], see `Rope.table`"""
    last_tokens: Tensor
    """[rows] see `ForwardBatch.last_tokens`"""
    _numbers: Mapping[Value, int]
    _rows: Sequence[Tensor]
    _sharded_rows: Sequence[Tensor]
    """Views of each buffer: the rows of all tokens, and those of this rank's shard."""
    _scratch: Tensor
    """Bytes."""
    num_tokens: int = 0
    """Tokens of the current batch without padding. Launches that are captured must not use it."""
    num_own_tokens: int = 0
    """Tokens of this rank's shard of them."""

    def __getitem__(self, value: Value) -> Tensor:
        """Return the value's rows, padded ones included: [rows, size]."""
        return (self._sharded_rows if value.is_sequence_sharded else self._rows)[self._numbers[value]]

    def without_padding(self, value: Value) -> Tensor:
        return self[value][: self.num_own_tokens if value.is_sequence_sharded else self.num_tokens]

    def scratch(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Return working memory, which the next call returns again."""
        tensors, start = [], 0
        for spec in specs:
            tensors.append(view_bytes(self._scratch, start, spec))
            start += spec.num_bytes
        return tensors


def view_bytes(memory: Tensor, start: int, spec: TensorSpec) -> Tensor:
    """Return a tensor in `memory`, uint8, that begins at the byte `start`."""
    size = math.prod(spec.shape) * spec.dtype.itemsize
    return memory[start : start + size].view(spec.dtype).view(spec.shape)
