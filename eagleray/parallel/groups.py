"""All that a worker has of its neighbours: opened first, joined when the addresses of all are known.

A tensor-parallel group whose ranks compute on CPUs of one node is shared memory, any other is torch.distributed;
between stages it is always torch.distributed. Every rank comes to the same conclusions by itself, from the topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from eagleray.messages.steps import GroupsOpened
from eagleray.messages.workers import Topology
from eagleray.parallel.distributed import TorchGroup, TorchProcessGroups
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.group import SingleRankGroup, TensorParallelGroup
from eagleray.parallel.mesh import SINGLE_ENGINE, EnginePosition, Mesh
from eagleray.parallel.rendezvous import LOOPBACK, bind_store, reach_store
from eagleray.parallel.shared_memory import Segment
from eagleray.parallel.stages import SingleStage, StageLinks, TorchStages
from eagleray.transport.shared_rings import supports_shared_memory


class Groups:
    """`tp`: the ranks that share every layer with this one; `stages`: the ways to the other stages; `experts`: the
    ranks that divide the experts, to be joined later if they are of several engines. `store`: what they need, if they
    do; in rank 0's process it serves the others too."""

    def __init__(
        self,
        mesh: Mesh,
        tp: TensorParallelGroup,
        stages: StageLinks,
        experts: ExpertGroup,
        store: TCPStore | None = None,
    ) -> None:
        self.mesh = mesh
        self.tp = tp
        self.stages = stages
        self.experts = experts
        self._store = store

    @classmethod
    def single(cls) -> Groups:
        """Of a worker that has the whole model."""
        tp = SingleRankGroup()
        return cls(Mesh(), tp, SingleStage(), ExpertGroup(tp))

    def close(self) -> None:
        """Leave them; harmless when repeated."""
        self.experts.leave()
        self.tp.close()
        self.stages.close()
        self._store = None


class OpenedGroups:
    """A rank's own part of what it shares with others, before it knows theirs."""

    def __init__(
        self,
        *,
        mesh: Mesh,
        topology: Topology,
        device: torch.device,
        store: TCPStore | None,
        segment: Segment | None,
        opened: GroupsOpened,
        engines: EnginePosition,
    ) -> None:
        self._mesh, self._topology, self._device, self._engines = mesh, topology, device, engines
        self._store = store
        self._segment = segment
        self.opened = opened
        """What the other ranks must know."""

    @classmethod
    def open(
        cls, *, mesh: Mesh, topology: Topology, device: torch.device, engines: EnginePosition = SINGLE_ENGINE
    ) -> OpenedGroups:
        """`engines`: those that share the experts with this one. Raises `ConfigError` for an address that is not this
        machine's, and for too little shared memory."""
        shares = _shares_memory(mesh.tp_ranks, topology, device)
        with ExitStack() as stack:
            segment = None
            if shares and mesh.tp_rank == 0:
                segment = Segment.create(mesh.tp_size)
                stack.callback(segment.close)
            store, address = None, None
            if mesh.rank == 0 and _needs_store(mesh, topology, device):
                store, address = bind_store(_host(mesh.rank, topology))
            stack.pop_all()
        return cls(
            mesh=mesh,
            topology=topology,
            device=device,
            store=store,
            segment=segment,
            opened=GroupsOpened(store=address, segment=None if segment is None else segment.ticket),
            engines=engines,
        )

    def join(self, opened: Sequence[GroupsOpened], *, timeout: float) -> Groups:
        """`opened`: what every rank has opened, by rank. All ranks must call this; where connections are made, it
        returns when they are. What was opened belongs to the groups then. Raises `DeadlineExceeded` after `timeout`
        seconds."""
        mesh = self._mesh
        if self._store is None and (address := opened[0].store) is not None:
            self._store = reach_store(address, timeout=timeout)
        with ExitStack() as stack:
            tp = self._join_tp(opened, timeout)
            stack.callback(tp.close)
            stages: StageLinks = SingleStage()
            if mesh.pp_size > 1:
                assert self._store is not None
                name = f"pipeline of tensor-parallel rank {mesh.tp_rank}"
                stages = TorchStages(mesh, self._connect(name, mesh.pp_rank, mesh.pp_size, timeout), self._store)
            stack.pop_all()
        store, self._store, self._segment = self._store, None, None
        address = self._topology.addresses[mesh.rank]
        experts = ExpertGroup(tp, engines=self._engines, address=address, device=self._device)
        return Groups(mesh, tp, stages, experts, store)

    def close(self) -> None:
        """Give back what was opened, unless it belongs to groups; harmless when repeated."""
        if self._segment is not None:
            self._segment.close()
        self._store = None

    def _join_tp(self, opened: Sequence[GroupsOpened], timeout: float) -> TensorParallelGroup:
        mesh = self._mesh
        if mesh.tp_size == 1:
            return SingleRankGroup()
        if not _shares_memory(mesh.tp_ranks, self._topology, self._device):
            name = f"tensor-parallel group of stage {mesh.pp_rank}"
            return TorchGroup(self._connect(name, mesh.tp_rank, mesh.tp_size, timeout))
        if self._segment is not None:
            return self._segment.join()
        ticket = opened[mesh.tp_ranks[0]].segment
        assert ticket is not None, "the first rank of a group on one node makes its memory"
        return Segment.attach(ticket, rank=mesh.tp_rank, num_ranks=mesh.tp_size)

    def _connect(self, name: str, rank: int, size: int, timeout: float) -> TorchProcessGroups:
        assert self._store is not None, "rank 0 binds the store"
        host = _host(self._mesh.rank, self._topology)
        return TorchProcessGroups(
            self._store, name, rank=rank, size=size, host=host, device=self._device, timeout=timeout
        )


def _shares_memory(ranks: Sequence[int], topology: Topology, device: torch.device) -> bool:
    on_one_node = len({topology.nodes[rank] for rank in ranks}) == 1
    return len(ranks) > 1 and on_one_node and device.type == "cpu" and supports_shared_memory()


def _needs_store(mesh: Mesh, topology: Topology, device: torch.device) -> bool:
    stages = [Mesh(rank=pp * mesh.tp_size, tp_size=mesh.tp_size, pp_size=mesh.pp_size) for pp in range(mesh.pp_size)]
    shares = all(_shares_memory(stage.tp_ranks, topology, device) for stage in stages)
    return mesh.pp_size > 1 or (mesh.tp_size > 1 and not shares)


def _host(rank: int, topology: Topology) -> str:
    """What this rank listens on: nothing that others can reach, if there are no other nodes."""
    return LOOPBACK if len(set(topology.nodes)) == 1 else topology.addresses[rank]
