"""The trainer's side of backend `gloo`. Needs torch alone; used in the process of the trainer that has whole weights.

sender = Sender(num_workers=4, address="10.0.0.1")       # GET /get_world_size tells their number
# in another thread or task: POST /init_weight_transfer_engine {"init_info": sender.init_info}
sender.connect()
weights = list(model.state_dict().items())
# in another thread or task: POST /start_weight_update, then
#                            POST /update_weights {"update_info": sender.update_info(weights)}
sender.send(weights)
# POST /finish_weight_update {"weight_version": "1"}
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from eagleray.errors import TransferBroken
from eagleray.weights.gloo_group import BUCKET_BYTES, GROUP_NAME, SENDER, GlooGroup
from eagleray.weights.tensors import as_bytes, bucket_bytes, describe, into_buckets, pack_bucket, to_update_info

NUM_BUFFERS = 2
"""Number of buckets in flight: one is sent while the next one is packed. Tensors that are sent in place may be more, up
to the size of these buckets, because beginning the broadcast of a small tensor takes longer than sending it."""


class SentBucket(NamedTuple):
    """A bucket whose broadcast has begun."""

    wait: Callable[[], None]
    num_bytes: int
    buffers: list[Tensor]
    """Its buffer, unless it is a tensor that is sent from where it is."""


class Sender:
    """Sends weights to `num_workers` workers, whose rank in the group begins at 1.

    Listens on `address`, an address of this machine that the workers can reach, and `port`, by default a free one.
    `timeout` limits each wait, in seconds. Each tensor is a broadcast of its own, which needs no copy on a CPU; with
    `is_packed`, tensors are packed into buckets, for models of many small ones.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        is_packed: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 300.0,
    ) -> None:
        self._address = address
        self._world_size = 1 + num_workers
        self._is_packed = is_packed
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._store: TCPStore | None = _bind_store(address, port, timeout)
        self._port = self._store.port
        self._group: GlooGroup | None = None

    @property
    def init_info(self) -> dict[str, Any]:
        """Fields for `init_weight_transfer_engine`."""
        return {
            "backend": "gloo",
            "master_address": self._address,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self._world_size,
            "packed": self._is_packed,
            "packed_buffer_size_bytes": self._bucket_bytes,
            "packed_num_buffers": NUM_BUFFERS,
            "group_name": GROUP_NAME,
        }

    def connect(self) -> None:
        """Wait until all workers are connected, which they are told by `init_weight_transfer_engine`. Raises
        `DeadlineExceeded` or `TransferBroken`."""
        assert self._store is not None, "the sender was closed"
        self._group = GlooGroup(
            self._store, GROUP_NAME, rank=SENDER, size=self._world_size, host=self._address, timeout=self._timeout
        )

    @staticmethod
    def update_info(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Return the fields for `update_weights`, which describe the tensors of `send`."""
        return to_update_info(describe(weights))

    def send(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Send the tensors, while the call of `update_weights` runs. Raises `TransferBroken` if a worker leaves, as all
        of them do when the update is refused; the answer of that call names the cause. The sender is closed then."""
        if self._group is None:
            raise TransferBroken("the sender is not connected to the workers: call `connect` first")
        try:
            self._send(self._group, weights)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group. Workers that wait for a tensor notice it. Idempotent."""
        if self._group is not None:
            self._group.close()
        self._group = self._store = None

    def _send(self, group: GlooGroup, weights: Sequence[tuple[str, Tensor]]) -> None:
        tensors = dict(weights)
        infos = describe(weights)
        buckets = into_buckets(infos, self._bucket_bytes) if self._is_packed else ([info] for info in infos)
        sent: deque[SentBucket] = deque()
        buffers: list[Tensor] = []
        for bucket in buckets:
            size = bucket_bytes(bucket)
            while len(sent) >= NUM_BUFFERS and sum(each.num_bytes for each in sent) >= NUM_BUFFERS * self._bucket_bytes:
                first = sent.popleft()
                first.wait()
                buffers += first.buffers
            parts = [tensors[info.name] for info in bucket]
            if len(parts) == 1 and parts[0].device.type == "cpu":  # nothing to pack
                sent.append(SentBucket(group.broadcast(as_bytes(parts[0])), size, []))
                continue
            buffer = buffers.pop() if buffers else torch.empty(0, dtype=torch.uint8)
            if len(buffer) < size:
                buffer = torch.empty(size, dtype=torch.uint8)
            pack_bucket(parts, buffer)
            sent.append(SentBucket(group.broadcast(buffer[:size]), size, [buffer]))
        for each in sent:
            each.wait()


def _bind_store(address: str, port: int, timeout: float) -> TCPStore:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen()
        bound: int = listening.getsockname()[1]
        return TCPStore(
            address,
            bound,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
