"""Backend `gloo`: broadcasts from the trainer to all workers, over TCP between their hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagleray.errors import TransferBroken
from eagleray.weights.gloo_group import BUCKET_BYTES, GlooGroup, reach_store
from eagleray.weights.receiver import (
    CheckTensors,
    GroupInfo,
    NamedTensors,
    Positive,
    ReceiverPosition,
    check_group,
    check_rank,
    read_fields,
)
from eagleray.weights.tensors import (
    SentTensor,
    aligned,
    bucket_bytes,
    into_buckets,
    read_update_info,
    unpack_bucket,
    view_as,
)


class GlooInfo(GroupInfo, frozen=True, kw_only=True):
    """`init_info` of backend `gloo`."""

    packed: bool = False
    """Whether tensors come in buckets, as bytes, or each by a broadcast of its own."""
    packed_buffer_size_bytes: Positive = BUCKET_BYTES
    packed_num_buffers: Positive = 2


class ExpectedBucket(NamedTuple):
    """Tensors of broadcasts that this rank has joined."""

    buffer: Tensor
    waits: list[Callable[[], None]]
    unpack: Callable[[], Iterator[tuple[str, Tensor]]]
    """Returns the tensors, once they have come."""


def open_receiver(init_info: Mapping[str, Any], position: ReceiverPosition, timeout: float) -> GlooReceiver:
    """Make the receiver of a worker, see `receiver.open_receiver`."""
    info = read_fields("gloo", "init_info", init_info, GlooInfo)
    return GlooReceiver(
        info, rank=check_rank("gloo", info.rank_offset + position.rank, info.world_size), timeout=timeout
    )


class GlooReceiver:
    """See `receiver.WeightReceiver`. Tensors are received into memory of the host."""

    def __init__(self, info: GlooInfo, *, rank: int, timeout: float) -> None:
        self._info = info
        self._rank = rank
        self._timeout = timeout
        self._group: GlooGroup | None = None
        self._is_closed = False
        self._buffers: list[Tensor] = []  # of buckets, free to receive into

    def connect(self) -> None:
        info = self._info
        store, host = reach_store(
            info.master_address,
            info.master_port,
            world_size=info.world_size,
            timeout=self._timeout,
            is_cancelled=lambda: self._is_closed,
        )
        self._group = GlooGroup(
            store, info.group_name, rank=self._rank, size=info.world_size, host=host, timeout=self._timeout
        )
        if self._is_closed:
            self.close()

    def receive(self, update_info: Mapping[str, Any], check: CheckTensors) -> Iterator[NamedTensors]:
        group = self._group
        if group is None:
            raise TransferBroken("the group was closed; the trainer must open another")
        begun: deque[ExpectedBucket] = deque()
        try:
            check_group(update_info, self._info.group_name)
            tensors = read_update_info(update_info)
            check(tensors)
            join = self._join_packed if update_info.get("packed", self._info.packed) else self._join_each
            for bucket in into_buckets(tensors, self._info.packed_buffer_size_bytes):
                if len(begun) == self._info.packed_num_buffers:
                    yield from self._finish(begun.popleft())
                begun.append(join(group, bucket))
            while begun:
                yield from self._finish(begun.popleft())
        except BaseException:
            self.close()  # the trainer's next broadcast fails; it would wait for this rank otherwise
            raise

    def close(self) -> None:
        self._is_closed = True
        if self._group is not None:
            self._group.close()
        self._group = None
        self._buffers.clear()

    def _join_packed(self, group: GlooGroup, bucket: list[SentTensor]) -> ExpectedBucket:
        """Begin to receive a bucket by one broadcast, so that it arrives while the one before it is used."""
        size = bucket_bytes(bucket)
        buffer = self._take_buffer(size)
        wait = group.broadcast(buffer[:size])
        return ExpectedBucket(buffer, [wait], lambda: unpack_bucket(buffer, bucket))

    def _join_each(self, group: GlooGroup, bucket: list[SentTensor]) -> ExpectedBucket:
        """Begin to receive a bucket by one broadcast for each tensor."""
        buffer = self._take_buffer(sum(aligned(tensor.num_bytes) for tensor in bucket))
        tensors, waits, begin = [], [], 0
        for tensor in bucket:
            part = buffer[begin : begin + tensor.num_bytes]
            waits.append(group.broadcast(part))
            tensors.append((tensor.name, view_as(part, tensor)))
            begin += aligned(tensor.num_bytes)
        return ExpectedBucket(buffer, waits, lambda: iter(tensors))

    def _take_buffer(self, size: int) -> Tensor:
        """Return a buffer of at least this size."""
        buffer = self._buffers.pop() if self._buffers else torch.empty(0, dtype=torch.uint8)
        return buffer if len(buffer) >= size else torch.empty(size, dtype=torch.uint8)

    def _finish(self, bucket: ExpectedBucket) -> Iterator[NamedTensors]:
        for wait in bucket.waits:
            wait()
        yield list(bucket.unpack())
        self._buffers.append(bucket.buffer)
