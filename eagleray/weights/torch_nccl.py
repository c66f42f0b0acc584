"""Backend `torch_nccl`: broadcasts between GPUs from a trainer whose group is one of torch.distributed.

torch makes the communicator of a group at its first operation. Rank 0 publishes NCCL's id then, in the group's part of
the store, under the number of the communicator. So this rank joins at the first broadcast too, not when it connects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from eagleray.errors import ConfigError, DeadlineExceeded, TransferBroken
from eagleray.weights.gloo_group import group_store, reach_store
from eagleray.weights.nccl import NcclInfo, NcclReceiver, check_id
from eagleray.weights.receiver import (
    CheckTensors,
    GroupInfo,
    NamedTensors,
    ReceiverPosition,
    check_group,
    check_rank,
    read_fields,
)

FIRST_COMMUNICATOR = "0"
"""Key of the id of a group's first communicator."""


def open_receiver(init_info: Mapping[str, Any], position: ReceiverPosition, timeout: float) -> TorchNcclReceiver:
    """Make the receiver of a worker, see `receiver.open_receiver`. Raises `ConfigError` on a CPU."""
    if position.device.type != "cuda":
        raise ConfigError("backend torch_nccl sends between GPUs, but the workers compute on the CPU: send by gloo")
    info = read_fields("torch_nccl", "init_info", init_info, GroupInfo)
    rank = check_rank("torch_nccl", info.rank_offset + position.rank, info.world_size)
    return TorchNcclReceiver(info, rank=rank, device=position.device, timeout=timeout)


class TorchNcclReceiver(NcclReceiver):
    """See `receiver.WeightReceiver`. Tensors come by one broadcast each."""

    def __init__(self, info: GroupInfo, *, rank: int, device: torch.device, timeout: float) -> None:
        super().__init__(NcclInfo(world_size=info.world_size), rank=rank, device=device, timeout=timeout)
        self._group = info
        self._store: Store | None = None

    def connect(self) -> None:
        group = self._group
        store, _ = reach_store(
            group.master_address,
            group.master_port,
            world_size=group.world_size,
            timeout=self._timeout,
            is_cancelled=lambda: self._is_closed,
        )
        self._store = group_store(store, group.group_name, "cuda")

    def receive(self, update_info: Mapping[str, Any], check: CheckTensors) -> Iterator[NamedTensors]:
        if self._store is None or self._is_closed:
            raise TransferBroken("the group was closed; the trainer must open another")
        try:
            check_group(update_info, self._group.group_name)
            if self._communicator is None:
                self._communicator = self._join(self._published_id(self._store))
        except BaseException:
            self.close()
            raise
        yield from super().receive(update_info, check)

    def _published_id(self, store: Store) -> bytes:
        try:
            store.wait([FIRST_COMMUNICATOR], timedelta(seconds=self._timeout))
            return check_id(store.get(FIRST_COMMUNICATOR))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"the trainer has begun no broadcast in the group {self._group.group_name!r} within "
                f"{self._timeout:g} s: {error}"
            ) from error
