"""Connections of torch.distributed: gloo between processes that compute on CPUs, NCCL between GPUs.

Process groups are made straight from the store of `rendezvous`; torch's global default group is left to the user.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, ReduceOp, Store, Work  # type: ignore[attr-defined]

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.parallel.group import OPERATION_SECONDS

__all__ = ["Connections", "TorchGroup", "finish"]

Operations = Any
"""A process group of one kind of device; torch's annotations leave out what it can do."""


class Connections:
    """Connections between `size` ranks, for tensors of the host and, if `device` is a GPU, for tensors of it.

    `host`: the address of this machine to listen on. Returns when all ranks are connected. Raises `DeadlineExceeded`
    if they are not within `timeout` seconds.
    """

    def __init__(
        self, store: Store, name: str, *, rank: int, size: int, host: str, device: torch.device, timeout: float
    ) -> None:
        self.rank, self.size = rank, size
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # by default it listens on any address
        began = time.monotonic()
        try:
            self._host = ProcessGroupGloo(PrefixStore(f"{name}/gloo", store), rank, size, options)
        except RuntimeError as error:
            if time.monotonic() - began < timeout:
                raise ChannelClosed(f"a rank of {name} is gone while they connect: {error}") from error
            raise DeadlineExceeded(
                f"the {size} ranks of {name} were not connected within {timeout:g} s: {error}"
            ) from error
        self._device = _nccl(PrefixStore(f"{name}/nccl", store), rank, size) if device.type == "cuda" else None

    def of(self, x: Tensor) -> Operations:
        """Those for tensors like this one."""
        if x.is_cuda:
            assert self._device is not None, "a tensor of a GPU, in a group of CPUs"
            return self._device
        return self._host


def _nccl(store: Store, rank: int, size: int) -> Operations:
    """Connects at the first operation. Its own watchdog ends the process when an operation takes too long."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=OPERATION_SECONDS)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def finish(what: str, start: Callable[[], Work], timeout: float, device: torch.device) -> None:
    """Start an operation on tensors of `device`, and wait for its end: on a GPU the stream waits, not we.

    Raises `DeadlineExceeded`, or `ChannelClosed` for any other failure.
    """
    started = time.monotonic()
    try:
        work = start()
        if device.type == "cuda":
            work.wait()  # with a limit it would be we who wait
        else:
            work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        if time.monotonic() - started >= timeout:
            raise DeadlineExceeded(f"{what}: has waited for {timeout:g} s ({error})") from error
        raise ChannelClosed(f"{what}: {error}") from error


class TorchGroup:
    """See `group.Group`. On CPUs, sums of bfloat16 and float16 are computed in float32 and rounded once; on GPUs they
    are NCCL's."""

    def __init__(self, connections: Connections, *, timeout: float = OPERATION_SECONDS) -> None:
        self.rank, self.size = connections.rank, connections.size
        self._connections: Connections | None = connections
        self._timeout = timeout

    @property
    def is_ordered(self) -> bool:
        return self.size <= 2  # of two there is but one order

    def all_reduce(self, x: Tensor) -> Tensor:
        wide = (x if x.is_cuda or x.itemsize >= 4 else x.float()).contiguous()
        limit = timedelta(seconds=self._timeout)
        self._finish("all_reduce", x, lambda group: group.allreduce(wide, ReduceOp.SUM, limit))
        return wide.to(x.dtype)

    def gather(self, x: Tensor) -> Tensor | None:
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else []
        limit = timedelta(seconds=self._timeout)
        self._finish("gather", x, lambda group: group.gather(parts, mine, 0, limit))
        return torch.cat(parts, dim=-1) if parts else None

    def broadcast(self, x: Tensor) -> Tensor:
        whole = x.contiguous()
        limit = timedelta(seconds=self._timeout)
        self._finish("broadcast", x, lambda group: group.broadcast(whole, 0, limit))
        return whole

    def close(self) -> None:
        self._connections = None

    def _finish(self, operation: str, x: Tensor, start: Callable[[Operations], Work]) -> None:
        if self._connections is None:
            raise ChannelClosed(f"{operation}: the group was closed")
        if x.numel() == 0:
            return
        backend = self._connections.of(x)
        others = ", ".join(str(rank) for rank in range(self.size) if rank != self.rank)
        what = f"{operation}: tensor-parallel rank {self.rank} of {self.size} with rank {others}"
        finish(what, lambda: start(backend), self._timeout, x.device)
