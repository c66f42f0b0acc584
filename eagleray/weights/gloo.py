"""Backend `gloo`: broadcasts from the trainer to all workers, over TCP between their hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from eagleray.errors import TransferBroken
from eagleray.weights.gloo_group import BUCKET_BYTES, GROUP_NAME, GlooGroup, reach_store
from eagleray.weights.receiver import CheckTensors, ReceiverPosition, check_rank, read_fields
from eagleray.weights.tensors import SentTensor, bucket_bytes, into_buckets, read_update_info, unpack_bucket


class GlooInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`init_info` of a group that the trainer holds together by a store."""

    master_address: str
    master_port: int
    world_size: int
    """Number of ranks, with the trainer."""
    rank_offset: int = 1
    """Rank of the first worker of the instance."""
    packed: bool = False
    """Whether tensors come in buckets, as bytes, or each by a broadcast of its own."""
    packed_buffer_size_bytes: int = BUCKET_BYTES
    packed_num_buffers: int = 2
    group_name: str = GROUP_NAME


class ExpectedBucket(NamedTuple):
    """Tensors of a broadcast that this rank has joined."""

    tensors: list[SentTensor]
    buffer: Tensor
    wait: Callable[[], None]


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

    def receive(self, update_info: Mapping[str, Any], check: CheckTensors) -> Iterator[tuple[str, Tensor]]:
        group = self._group
        if group is None:
            raise TransferBroken("the group was closed; the trainer must open another")
        begun: deque[ExpectedBucket] = deque()
        try:
            tensors = read_update_info(update_info)
            check(tensors)
            for bucket in self._buckets(tensors, is_packed=bool(update_info.get("packed", self._info.packed))):
                begun.append(self._join(group, bucket))
                if len(begun) == self._info.packed_num_buffers:
                    yield from self._finish(begun.popleft())
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

    def _buckets(self, tensors: list[SentTensor], *, is_packed: bool) -> Iterator[list[SentTensor]]:
        """Return the tensors of each broadcast."""
        if is_packed:
            return into_buckets(tensors, self._info.packed_buffer_size_bytes)
        return ([tensor] for tensor in tensors)

    def _join(self, group: GlooGroup, bucket: list[SentTensor]) -> ExpectedBucket:
        """Begin to receive a bucket, so that it arrives while the one before it is used."""
        size = bucket_bytes(bucket)
        buffer = self._buffers.pop() if self._buffers else torch.empty(0, dtype=torch.uint8)
        if len(buffer) < size:
            buffer = torch.empty(size, dtype=torch.uint8)
        return ExpectedBucket(bucket, buffer, group.broadcast(buffer[:size]))

    def _finish(self, bucket: ExpectedBucket) -> Iterator[tuple[str, Tensor]]:
        bucket.wait()
        yield from unpack_bucket(bucket.buffer, bucket.tensors)
        self._buffers.append(bucket.buffer)
