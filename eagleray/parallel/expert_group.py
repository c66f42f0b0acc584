"""The workers that divide the experts among them: all of one stage, of all engines that step together.

Engines start and exit, and their number changes, so the group has an epoch: the group of an epoch is opened, joined
when the engines know what all have opened, and left when one of them is gone; that of the next epoch is another group,
perhaps of other engines. An engine that always has all experts uses its tensor-parallel group, which needs no epoch.

Ranks on one node exchange rows through shared memory and watch each other's processes; others use connections, which
break when a process exits. When a member is gone, an operation raises `ExpertGroupBroken`: on all tensor-parallel ranks
of an engine in the same operation, so that they stay in step with each other. Shared memory guarantees that by itself
(`rounds.py`); over connections these ranks check with each other after every operation. On GPUs an operation has only
begun when it returns, so whoever waits for its result watches the processes meanwhile (`check_processes`,
`wait_until_done`).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from eagleray.errors import ChannelClosed, DeadlineExceeded, ExpertGroupBroken
from eagleray.messages.workers import EngineOpened, GroupOpened
from eagleray.parallel.distributed import TorchGroup, TorchProcessGroups
from eagleray.parallel.group import RehearsalGroup, SingleRankGroup, TensorParallelGroup
from eagleray.parallel.mesh import SINGLE_ENGINE, EnginePosition
from eagleray.parallel.process_watcher import ProcessWatcher
from eagleray.parallel.rendezvous import LOOPBACK, bind_store, reach_store
from eagleray.parallel.shared_memory import Segment, SharedMemoryGroup
from eagleray.parallel.timeouts import OPERATION_TIMEOUT_SECONDS, SLEEP_SECONDS
from eagleray.transport.shared_rings import supports_shared_memory

KIND = "expert"

CPU = torch.device("cpu")


class SharedMemoryOffer(msgspec.Struct, frozen=True, array_like=True):
    """The facts about a rank for ranks of the same host, which may share memory and watch its process."""

    pid: int
    host: str
    """Equal on ranks that see the same process ids and can share memory."""
    segment: bytes | None
    """Handle of the group's memory, from the first rank if the ranks compute on CPUs."""


class ExpertGroup:
    """This rank's end of the group, where rank = the engine's position x tensor-parallel size + tensor-parallel rank.

    The operations are those of `TensorParallelGroup`; they raise `ExpertGroupBroken` when a member is gone, and while
    no group is joined.

    `tp`: the tensor-parallel group of this rank, which outlives the group. `engines`: the position of the engine until
    `open` gives another one. `address`: where ranks of other nodes reach this one. `device`: the device that it
    computes on.
    """

    def __init__(
        self,
        tp: TensorParallelGroup,
        *,
        engines: EnginePosition = SINGLE_ENGINE,
        address: str = LOOPBACK,
        device: torch.device = CPU,
    ) -> None:
        self._tp = tp
        self.set_position(engines)
        self.epoch = 0
        self.spans_engines = engines.size > 1
        """Whether the group is formed anew in every epoch. It may have a single engine then, for a while."""
        self.bytes_sent: dict[str, int] = Counter() if self.spans_engines else tp.bytes_sent
        self._address = address
        self._device = device
        self._group: SharedMemoryGroup | TorchGroup | SingleRankGroup | None = None
        self._reason = "no group of engines that share the experts was joined yet"
        self._needs_agreement = False
        self._exit_stack = ExitStack()  # resources of this epoch
        self._segment: Segment | None = None
        self._store: TCPStore | None = None
        self._watcher: ProcessWatcher | None = None

    def set_position(self, engines: EnginePosition) -> None:
        """Set the rank and the size of the group that is formed next."""
        self.rank = engines.rank * self._tp.size + self._tp.rank
        self.size = engines.size * self._tp.size

    def open(self, epoch: int, engines: EnginePosition | None = None) -> GroupOpened:
        """Leave the current group, and open the resources that others need to join that of `epoch`, in which the engine
        has the position `engines`, by default that of the epoch before. Raises `ConfigError` for an address that is not
        this machine's, and for too little shared memory."""
        self.epoch = epoch
        if not self.spans_engines:
            return GroupOpened()
        self.leave()
        if engines is not None:
            self.set_position(engines)
        if self.size == 1:
            return GroupOpened()
        can_share = self._device.type == "cpu" and supports_shared_memory()
        address = None
        if self.rank == 0:
            if can_share:
                self._segment = Segment.create(self.size)
                self._exit_stack.callback(self._segment.close)
            if not can_share or self._address != LOOPBACK:
                self._store, address = bind_store(self._address)
        has_offer = can_share or self._device.type == "cuda"
        return GroupOpened(store=address, segment=self._offer() if has_offer else None)

    def join(self, epoch: int, members: Sequence[EngineOpened], timeout: float) -> None:
        """Join, and return when all ranks have joined. Raises `DeadlineExceeded` if they have not within `timeout`
        seconds, and `ConfigError` if their resources cannot be reached. If a rank is gone by then, the group counts as
        joined and broken: its operations raise `ExpertGroupBroken`."""
        if not self.spans_engines:
            return
        assert epoch == self.epoch, f"epoch {epoch} is joined, but {self.epoch} was opened"
        if self.size == 1:
            self._needs_agreement, self._group = False, SingleRankGroup()
            self._group.bytes_sent = self.bytes_sent
            return
        ordered = sorted(members, key=lambda member: member.rank)
        opened = [one for member in ordered for one in member.opened]
        assert len(opened) == self.size, f"{len(opened)} ranks are to join, but {self.size} share the experts"
        nodes = {node for member in ordered for node in member.topology.nodes}
        offers = [_decode(one.segment) for one in opened if one.segment is not None]
        is_one_host = len(offers) == self.size and len({offer.host for offer in offers}) == len(nodes) == 1
        can_share = is_one_host and offers[0].segment is not None
        self._needs_agreement = not can_share and self._tp.size > 1
        try:
            group = self._share_memory(offers, timeout) if can_share else self._connect(opened[0].store, timeout)
        except ChannelClosed as error:
            self._mark_broken(error)
            return
        self._exit_stack.callback(group.close)
        if self._device.type == "cuda":
            self._watcher = ProcessWatcher([offer.pid for offer in offers if offer.host == _this_host()])
            self._exit_stack.callback(self._watcher.close)
        group.bytes_sent = self.bytes_sent
        self._group = group

    def leave(self) -> None:
        """Leave the group; ranks that wait for this one notice it. Idempotent."""
        if self.spans_engines:
            self._group, self._reason = None, f"the group of epoch {self.epoch} that shares the experts was left"
            self._segment = self._store = self._watcher = None
            self._exit_stack.close()

    def check_processes(self) -> str | None:
        """Return the reason if the group of GPUs is broken because another rank's process on this host has exited. The
        group is left then, which ends the operations that wait for that rank, with any result."""
        if self._watcher is None or not self._watcher.exited():
            return None
        self._mark_broken(ChannelClosed("a process of this host has exited"))
        return self._reason

    def wait_until_done(self) -> None:
        """Return when the operations so far are done and their results have arrived; on CPUs they are when they return.

        Raises `ExpertGroupBroken` if another rank's process on this host has exited meanwhile: the results may be
        anything then. Raises `DeadlineExceeded` after `OPERATION_TIMEOUT_SECONDS`.
        """
        if self.spans_engines and self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self._device))
            self._wait_until(done.query, timeout=OPERATION_TIMEOUT_SECONDS)

    def _wait_until(self, is_done: Callable[[], bool], *, timeout: float) -> None:
        due = time.monotonic() + timeout
        while not is_done():
            if self.check_processes() is not None:
                break
            if time.monotonic() >= due:
                raise DeadlineExceeded(f"the group of epoch {self.epoch} that shares the experts: waited {timeout:g} s")
            time.sleep(SLEEP_SECONDS)
        # An operation that was ended because its group is broken counts as done.
        if self.check_processes() is not None or self._group is None:
            raise ExpertGroupBroken(self._reason)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Stand in for the other ranks while no group is joined: each has what this rank has. Operations of this block
        take the memory of those of a joined group."""
        if self.spans_engines:
            assert self._group is None, "a group is joined"
            self._group = RehearsalGroup(self.rank, self.size)
        try:
            yield
        finally:
            if self.spans_engines:
                self._group = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._run(lambda group: group.all_reduce(x), x)

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return self._run(lambda group: group.all_gather(x, counts), x)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return self._run(lambda group: group.reduce_scatter(x, counts), x)

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        return self._run(lambda group: group.all_to_all(x, send_counts, receive_counts), x)

    def agree(self, is_idle: bool, num_tokens: int) -> tuple[bool, list[int]]:
        """Return whether any rank is not idle, and the `num_tokens` of every rank."""
        own = torch.tensor([[not is_idle, num_tokens]], dtype=torch.int64)
        gathered: list[list[int]] = self.all_gather(own, [1] * self.size).tolist()
        return any(is_busy for is_busy, _ in gathered), [count for _, count in gathered]

    def _offer(self) -> bytes:
        segment = None if self._segment is None else self._segment.handle
        return msgspec.msgpack.encode(SharedMemoryOffer(os.getpid(), _this_host(), segment))

    def _share_memory(self, offers: list[SharedMemoryOffer], timeout: float) -> SharedMemoryGroup:
        with ExitStack() as stack:
            watcher = ProcessWatcher([offer.pid for offer in offers])
            stack.callback(watcher.close)
            if self._segment is not None:
                group = self._segment.join(kind=KIND, watcher=watcher)
            else:
                handle = offers[0].segment
                assert handle is not None, "the first rank of a group on one node creates its memory"
                group = Segment.attach(handle, rank=self.rank, num_ranks=self.size, kind=KIND, watcher=watcher)
            stack.callback(group.close)
            group.join(timeout)
            stack.pop_all()
        self._store = None  # only needed for connections
        return group

    def _connect(self, address: str | None, timeout: float) -> TorchGroup:
        if self._store is None:
            assert address is not None, "the first rank of a group over several nodes binds its store"
            self._store = reach_store(address, timeout=timeout)
        connections = TorchProcessGroups(
            self._store,
            f"the group of epoch {self.epoch} that shares the experts",
            rank=self.rank,
            size=self.size,
            host=self._address,
            device=self._device,
            timeout=timeout,
        )
        group = TorchGroup(connections, kind=KIND)
        if self._device.type == "cuda":
            with ExitStack() as stack:
                stack.callback(group.close)
                group.warm_up(self._device)
                stack.pop_all()
        return group

    def _run(self, operation: Callable[[TensorParallelGroup], Tensor], x: Tensor) -> Tensor:
        if not self.spans_engines:
            return operation(self._tp)
        if self._group is None:
            self._is_broken_anywhere(True, x)
            raise ExpertGroupBroken(self._reason)
        try:
            result = operation(self._group)
        except ChannelClosed as error:
            self._mark_broken(error)
            self._is_broken_anywhere(True, x)
            raise ExpertGroupBroken(self._reason) from error
        if self._is_broken_anywhere(False, x):
            self._mark_broken(ChannelClosed("another worker of this engine has noticed it"))
            raise ExpertGroupBroken(self._reason)
        return result

    def _is_broken_anywhere(self, is_broken_here: bool, x: Tensor) -> bool:
        """Whether a tensor-parallel rank of this engine has found the group broken, in the same operation on `x`. The
        ranks do not check this on GPUs, where an operation has only begun here; there, `agree` notices it."""
        if not self._needs_agreement or x.is_cuda:
            return is_broken_here
        return self._tp.all_reduce(torch.tensor([float(is_broken_here)])).item() > 0

    def _mark_broken(self, error: ChannelClosed) -> None:
        self.leave()
        self._reason = f"an engine that shares the experts is gone, the group of epoch {self.epoch} is broken: {error}"


def _this_host() -> str:
    """Return a name that is equal in processes that see the same process ids and can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _decode(offer: bytes) -> SharedMemoryOffer:
    return msgspec.msgpack.decode(offer, type=SharedMemoryOffer)
