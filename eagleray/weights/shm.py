"""Backend `shm`: weights in shared memory of the node, or in a file of the same form.

Each rank reads the segment through the page cache, and touches only the pages of its part of the model.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from eagleray.errors import InvalidRequest, NotFound, WeightsMismatch
from eagleray.kernels.cpu.mapped_files import MappedFile
from eagleray.weights.receiver import CheckTensors, NamedTensors, ReceiverPosition, read_fields
from eagleray.weights.shared_memory_sender import SHARED_MEMORY_DIR, node_id
from eagleray.weights.tensors import FILE_BUCKET_BYTES, SentTensor, into_buckets, read_update_info, view_as


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of an `update_info` that say where the tensors are."""

    offsets: list[int]
    """Byte at which each tensor begins."""
    name: str
    """Name of a POSIX segment, or the absolute path of a file."""
    size: Annotated[int, Meta(ge=0)]
    """Number of bytes that are mapped."""
    node: str = ""
    """Id of the trainer's node, see `node_id`; empty if it is not known."""


def open_receiver(init_info: Mapping[str, Any], position: ReceiverPosition, timeout: float) -> SharedMemoryReceiver:
    """Make the receiver of a worker, see `receiver.open_receiver`. `init_info` needs no fields."""
    return SharedMemoryReceiver()


class SegmentFile(NamedTuple):
    """What tells a segment from others, also from one that grew."""

    device: int
    inode: int
    size: int


class SharedMemoryReceiver:
    """See `receiver.WeightReceiver`. There is no group: the tensors are in the segment before the call.

    Once connected, it keeps the last segment mapped, because mapping its pages takes longer than reading them.
    """

    def __init__(self) -> None:
        self._is_connected = False
        self._kept: tuple[SegmentFile, Tensor] | None = None

    def connect(self) -> None:
        """Keep segments mapped between updates, until `close`."""
        self._is_connected = True

    def receive(self, update_info: Mapping[str, Any], check: CheckTensors) -> Iterator[NamedTensors]:
        tensors = read_update_info(update_info)
        segment = read_fields("shm", "update_info", update_info, SegmentInfo)
        _check_offsets(tensors, segment)
        check(tensors)
        if segment.size == 0:
            return
        buffer = self._map(segment)
        offsets = iter(segment.offsets)
        for bucket in into_buckets(tensors, FILE_BUCKET_BYTES):
            yield [
                (tensor.name, view_as(buffer[offset : offset + tensor.num_bytes], tensor))
                for tensor, offset in zip(bucket, offsets, strict=False)
            ]

    def close(self) -> None:
        self._is_connected, self._kept = False, None

    def _map(self, segment: SegmentInfo) -> Tensor:
        """Return the bytes of the segment. Raises `NotFound` if it is not on this node."""
        with _open(segment) as file:
            status = os.fstat(file.fileno())
            key = SegmentFile(status.st_dev, status.st_ino, segment.size)
            if self._kept is not None and self._kept[0] == key:
                return self._kept[1]
            self._kept = None  # the trainer may have removed it: its memory is free then
            if not self._is_connected:
                return MappedFile.open(_path(segment.name), file.fileno(), segment.size)
            # private, so that torch may have it as writable; nobody writes to it
            mapped = mmap.mmap(file.fileno(), segment.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._kept = key, torch.frombuffer(mapped, dtype=torch.uint8)
        return self._kept[1]


def _check_offsets(tensors: list[SentTensor], segment: SegmentInfo) -> None:
    """Raise `WeightsMismatch` unless every tensor lies inside the segment."""
    if len(segment.offsets) != len(tensors):
        raise WeightsMismatch(f"update_info: {len(tensors)} `names`, but {len(segment.offsets)} `offsets`")
    for tensor, offset in zip(tensors, segment.offsets, strict=True):
        if not 0 <= offset <= segment.size - tensor.num_bytes:
            raise WeightsMismatch(
                f"{tensor.name}: {tensor.num_bytes} bytes at offset {offset} are not inside the {segment.size} bytes "
                f"of {segment.name}"
            )


def _open(segment: SegmentInfo) -> BinaryIO:
    """Open the file of the segment. Raises `NotFound` if it is not on this node, and `WeightsMismatch`."""
    if segment.node and segment.node != node_id():
        raise NotFound(
            f"the segment {segment.name} is on another node than this worker; backend shm needs the trainer on the "
            "node of the workers: send by gloo or nccl"
        )
    path = _path(segment.name)
    try:
        # a pipe would wait for its writer
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NotFound(
            f"{str(path)!r:.200} cannot be opened ({reason}): the segment must exist on the node of the workers, and "
            "their user must be allowed to read it"
        ) from error
    status = os.fstat(opened)
    if not stat.S_ISREG(status.st_mode):
        os.close(opened)
        raise WeightsMismatch(f"{path} is neither a POSIX segment nor a file")
    if (size := status.st_size) < segment.size:
        os.close(opened)
        raise WeightsMismatch(f"{path} has {size} bytes, but update_info says {segment.size}")
    return os.fdopen(opened, "rb")


def _path(name: str) -> Path:
    """Return the file of a segment: `name` and `/name` are POSIX segments, anything longer a path."""
    path = Path(name)
    if path.is_absolute() and len(path.parts) > 2:
        return path
    bare = name.removeprefix("/")
    if not bare or "/" in bare or bare in (".", ".."):
        raise InvalidRequest(
            f"update_info: {name!r:.80} is neither the name of a POSIX segment nor an absolute path", param="name"
        )
    return SHARED_MEMORY_DIR / bare
