"""Groups over torch.distributed: gloo between processes that compute on CPUs, NCCL between GPUs.

Process groups are created directly on the store of `rendezvous`; torch's global default group is left to the user.

NCCL connects ranks at their first operation, which takes seconds and memory and cannot be captured into a CUDA graph.
So groups of GPUs do one operation of each kind when they are made (`TorchGroup.warm_up`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions
from torch.distributed import PrefixStore, ReduceOp, Store, Work  # type: ignore[attr-defined]

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.parallel.gloo_connections import GlooConnections
from eagleray.parallel.group import add_in_order
from eagleray.parallel.small_sums import SmallSum, open_small_sum
from eagleray.parallel.timeouts import OPERATION_TIMEOUT_SECONDS

Operations = Any
"""A process group for one kind of device. torch's annotations omit its operations."""


class TorchProcessGroups:
    """Connections between `size` ranks, for tensors on the host and, if `device` is a GPU, for tensors on it.

    Listens on `host`, an address of this machine, and returns when all ranks are connected. Raises `DeadlineExceeded`
    if they are not within `timeout` seconds.
    """

    def __init__(
        self, store: Store, name: str, *, rank: int, size: int, host: str, device: torch.device, timeout: float
    ) -> None:
        self.rank, self.size = rank, size
        self._host = GlooConnections(
            PrefixStore(f"{name}/gloo", store), name, rank=rank, size=size, host=host, timeout=timeout
        )
        self._device = _nccl(PrefixStore(f"{name}/nccl", store), rank, size) if device.type == "cuda" else None

    @property
    def has_nccl(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self._device is not None

    def of(self, device: torch.device) -> Operations:
        """Return the process group for tensors on this device."""
        if device.type == "cuda":
            assert self._device is not None, "a tensor on a GPU in a group of CPUs"
            return self._device
        return self._host.group

    def run(self, what: str, start: Callable[[Operations], Work | None], timeout: float, device: torch.device) -> None:
        """Run an operation of all ranks on tensors of `device`, as `run_operation` does. On the host a rank that is
        gone ends it at once, and the error names the rank."""
        if device.type == "cuda":
            run_operation(what, lambda: start(self.of(device)), timeout, device)
        else:
            self._host.begin(what, start, timeout)()

    def close(self) -> None:
        """Close the connections. Ranks that wait for this one notice it."""
        self._host.close()
        if self._device is not None:
            self._device.abort()


def _nccl(store: Store, rank: int, size: int) -> Operations:
    """Return an NCCL process group, which connects at the first operation. NCCL's own watchdog ends the process when an
    operation takes too long."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=OPERATION_TIMEOUT_SECONDS)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _in_stream(options: Any, timeout: timedelta) -> Any:
    """Return the options of an operation that a GPU does in the current stream, in order with what is there."""
    options.asyncOp = False
    options.timeout = timeout
    return options


def run_operation(what: str, start: Callable[[], Work | None], timeout: float, device: torch.device) -> None:
    """Start an operation on tensors of `device` and wait until it is done; on a GPU the stream waits, not the caller.
    There is nothing to wait for if the operation has been put into the current stream itself (None). Transfers between
    two ranks of the host cannot be waited for in steps, because gloo breaks all connections at the first limit.

    Raises `DeadlineExceeded`, or `ChannelClosed` for any other failure.
    """
    started = time.monotonic()
    try:
        work = start()
        if work is None:
            return
        if device.type == "cuda":
            work.wait()  # with a limit, the caller would wait
        else:
            work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        if time.monotonic() - started >= timeout:
            raise DeadlineExceeded(f"{what}: has waited for {timeout:g} s ({error})") from error
        raise ChannelClosed(f"{what}: {error}") from error


class TorchGroup:
    """A `TensorParallelGroup` over connections. On CPUs, sums of bfloat16 and float16 are computed in float32 and
    rounded once, and `reduce_scatter` adds in order of the ranks; on GPUs sums are NCCL's. `kind` is the kind of group,
    for messages. `has_collectives`: gather and scatter rows by the operations of NCCL or gloo instead of exchanges
    between pairs of ranks; by default on GPUs."""

    def __init__(
        self,
        connections: TorchProcessGroups,
        *,
        timeout: float = OPERATION_TIMEOUT_SECONDS,
        kind: str = "tensor-parallel",
        has_collectives: bool | None = None,
    ) -> None:
        self.rank, self.size = connections.rank, connections.size
        self.bytes_sent: dict[str, int] = Counter()
        self._connections: TorchProcessGroups | None = connections
        self._timeout = timeout
        self._kind = kind
        self._has_collectives = connections.has_nccl if has_collectives is None else has_collectives
        self._small_sum: SmallSum | None = None

    @property
    def is_ordered(self) -> bool:
        return self.size <= 2  # two addends have only one order

    @property
    def is_capturable(self) -> bool:
        return self._connections is not None and self._connections.has_nccl

    def warm_up(self, device: torch.device) -> None:
        """Do one operation of each kind. All ranks of the group call this together."""
        counts = [1] * self.size
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.zeros((1, 8), dtype=dtype, device=device)
            self.all_reduce(x)
            self.all_gather(x, counts)
            self.reduce_scatter(x.repeat(self.size, 1), counts)
            self.all_to_all(x.repeat(self.size, 1), counts, counts)
        self.bytes_sent.clear()

    def open_small_sum(self, make: Callable[[], SmallSum], *, is_possible: bool, device: torch.device) -> None:
        """Add up small tensors by `make()` from now on, if it works on all ranks, which call this together."""
        self._small_sum = open_small_sum(
            make, is_possible=is_possible, rank=self.rank, size=self.size, device=device, agree=self._agree
        )
        self.bytes_sent.clear()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._small_sum is not None and x.is_cuda and self._small_sum.serves(x):
            self._small_sum.add_up(x)
            self.bytes_sent["all_reduce"] += x.nbytes
            return x
        wide = (x if x.is_cuda or x.itemsize >= 4 else x.float()).contiguous()
        limit = timedelta(seconds=self._timeout)
        if x.is_cuda:
            options = _in_stream(AllreduceOptions(), limit)
            options.reduceOp = ReduceOp.SUM
            self._run_unless_empty("all_reduce", x, lambda group: group.allreduce([wide], options))
        else:
            self._run_unless_empty("all_reduce", x, lambda group: group.allreduce(wide, ReduceOp.SUM, limit))
        self.bytes_sent["all_reduce"] += x.nbytes
        return wide.to(x.dtype)

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        assert len(x) == counts[self.rank], "x has the rows of this rank"
        if self._has_collectives:
            return self._gather_padded(x, counts)
        whole = x.repeat(self.size, *[1] * (x.ndim - 1))  # every rank gets the same
        self.bytes_sent["all_gather"] += x.nbytes
        return self._all_to_all("all_gather", whole, [len(x)] * self.size, counts)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        if self._has_collectives:
            return self._scatter_padded(x, counts)
        own = counts[self.rank]
        parts = self._all_to_all("reduce_scatter", x, counts, [own] * self.size)
        out = parts.new_empty((own, *x.shape[1:]))
        self.bytes_sent["reduce_scatter"] += x.nbytes - out.nbytes
        add_in_order(list(parts.split(own)) if own else [parts] * self.size, out=out)
        return out

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        out = self._all_to_all("all_to_all", x, send_counts, receive_counts)
        self.bytes_sent["all_to_all"] += x.nbytes - x[: send_counts[self.rank]].nbytes
        return out

    def gather(self, x: Tensor) -> Tensor | None:
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else []
        limit = timedelta(seconds=self._timeout)
        self._run_unless_empty("gather", x, lambda group: group.gather(parts, mine, 0, limit))
        if self.rank != 0:
            self.bytes_sent["gather"] += x.nbytes
        return torch.cat(parts, dim=-1) if parts else None

    def broadcast(self, x: Tensor) -> Tensor:
        whole = x.contiguous()
        limit = timedelta(seconds=self._timeout)
        self._run_unless_empty("broadcast", x, lambda group: group.broadcast(whole, 0, limit))
        if self.rank == 0:
            self.bytes_sent["broadcast"] += x.nbytes
        return whole

    def close(self) -> None:
        if self._connections is not None:
            self._connections.close()
        self._connections = None

    def _agree(self, is_true: bool) -> bool:
        """Whether it is true on all ranks."""
        return bool(self.all_reduce(torch.tensor([float(is_true)])).item() == self.size)

    def _gather_padded(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather rows by the operation for equal counts: each rank's rows are padded to the longest. The padding is
        removed by the counts alone, which the host knows."""
        longest = max(counts)
        own = x.contiguous()
        if len(x) < longest:
            own = x.new_empty((longest, *x.shape[1:]))
            own[: len(x)].copy_(x)
        whole = x.new_empty((self.size * longest, *x.shape[1:]))
        sent, received = own.view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8)
        options = _in_stream(AllgatherOptions(), timedelta(seconds=self._timeout))
        self._run_unless_empty("all_gather", whole, lambda group: group._allgather_base(received, sent, options))
        self.bytes_sent["all_gather"] += x.nbytes
        if min(counts) == longest:
            return whole
        parts = whole.view(self.size, longest, *x.shape[1:])
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _scatter_padded(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Add up and scatter rows by the operation for equal counts, see `_gather_padded`."""
        assert len(x) == sum(counts), "x has the rows of all ranks"
        longest, own = max(counts), counts[self.rank]
        padded = x.contiguous()
        if min(counts) < longest:
            padded = x.new_zeros((self.size * longest, *x.shape[1:]))
            for rank, part in enumerate(x.split(list(counts))):
                padded[rank * longest : rank * longest + len(part)].copy_(part)
        out = x.new_empty((longest, *x.shape[1:]))
        options = _in_stream(ReduceScatterOptions(), timedelta(seconds=self._timeout))
        options.reduceOp = ReduceOp.SUM
        self._run_unless_empty("reduce_scatter", out, lambda group: group._reduce_scatter_base(out, padded, options))
        self.bytes_sent["reduce_scatter"] += x.nbytes - x[:own].nbytes
        return out[:own]

    def _all_to_all(
        self, operation: str, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        """Exchange rows as bytes, which every backend can send whatever the dtype. A rank takes part even if it has
        nothing to send, because the others count operations."""
        assert len(x) == sum(send_counts), "x has the rows that are sent"
        out = x.new_empty((sum(receive_counts), *x.shape[1:]))
        row_bytes = x.shape[1:].numel() * x.itemsize
        sizes = [[count * row_bytes for count in counts] for counts in (receive_counts, send_counts)]
        sent, received = x.reshape(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
        limit = timedelta(seconds=self._timeout)
        if row_bytes > 0:
            self._run(operation, x.device, lambda group: group.alltoall_base(received, sent, *sizes, limit))
        return out

    def _run_unless_empty(self, operation: str, x: Tensor, start: Callable[[Operations], Work | None]) -> None:
        if x.numel() > 0:
            self._run(operation, x.device, start)
        elif self._connections is None:
            raise ChannelClosed(f"{operation}: the group was closed")

    def _run(self, operation: str, device: torch.device, start: Callable[[Operations], Work | None]) -> None:
        if self._connections is None:
            raise ChannelClosed(f"{operation}: the group was closed")
        others = ", ".join(str(rank) for rank in range(self.size) if rank != self.rank)
        what = f"{operation}: {self._kind} rank {self.rank} of {self.size} with rank {others}"
        self._connections.run(what, start, self._timeout, device)
