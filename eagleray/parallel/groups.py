"""The groups that a worker shares with other workers: opened first, joined when the addresses of all are known.

A tensor-parallel group whose ranks compute on CPUs of one node uses shared memory, any other torch.distributed; links
between stages always use torch.distributed. Every rank decides this by itself, from the topology, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from eagleray.messages.workers import GroupOpened, Topology
from eagleray.parallel.default_group import DefaultGroup, open_default_group
from eagleray.parallel.distributed import TorchGroup, TorchProcessGroups
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.group import SingleRankGroup, TensorParallelGroup
from eagleray.parallel.mesh import SINGLE_ENGINE, EnginePosition, Mesh
from eagleray.parallel.rendezvous import LOOPBACK, bind_store, reach_store
from eagleray.parallel.shared_memory import Segment
from eagleray.parallel.small_sums import SmallSum, SymmetricSum
from eagleray.parallel.stages import StageLinks
from eagleray.transport.shared_rings import supports_shared_memory


class Groups:
    """The groups of one worker. `stages` is None if all layers are in one stage. `experts` is joined later if several
    engines divide the experts. `store`, if given, is kept while the groups are in use: in the process of rank 0 it
    serves the others too. `ranks_sample_alike`: see the attribute."""

    def __init__(
        self,
        mesh: Mesh,
        tp: TensorParallelGroup,
        stages: StageLinks | None,
        experts: ExpertGroup,
        store: TCPStore | None = None,
        *,
        ranks_sample_alike: bool = False,
    ) -> None:
        self.mesh = mesh
        self.tp = tp
        self.stages = stages
        self.experts = experts
        self.ranks_sample_alike = ranks_sample_alike
        """Whether every rank of the last stage has the logits and samples, all with the same result, so that no token
        travels between them. Otherwise the first of them samples and sends the tokens to the others."""
        self._store = store
        self._default: DefaultGroup | None = None

    @property
    def is_sampling(self) -> bool:
        """Whether this rank samples."""
        return self.mesh.is_last_stage if self.ranks_sample_alike else self.mesh.is_sampler

    @classmethod
    def single(cls) -> Groups:
        """Return the groups of a worker that has the whole model."""
        tp = SingleRankGroup()
        return cls(Mesh(), tp, None, ExpertGroup(tp))

    def open_default(self, *, host: str, device: torch.device, timeout: float) -> None:
        """Initialize torch's default process group over the ranks of the engine, unless this process has one. All ranks
        call this, and the groups must have been opened with `needs_store`. See `open_default_group`."""
        size = self.mesh.world_size
        self._default = open_default_group(
            self._store, rank=self.mesh.rank, size=size, host=host, device=device, timeout=timeout
        )

    def close(self) -> None:
        """Leave all groups; harmless when repeated."""
        if self._default is not None:
            self._default.close()
        self.experts.leave()
        self.tp.close()
        if self.stages is not None:
            self.stages.close()
        self._store = None


class OpenedGroups:
    """The resources that a rank has opened for its groups, before it knows those of the others."""

    def __init__(
        self,
        *,
        mesh: Mesh,
        topology: Topology,
        device: torch.device,
        engines: EnginePosition = SINGLE_ENGINE,
        ranks_sample_alike: bool | None = None,
        needs_store: bool = False,
    ) -> None:
        """Open this rank's resources. `engines` is the engine's position among the engines that divide the experts.
        `needs_store`: several ranks meet in a store even if no group of theirs does, for `Groups.open_default`.
        `ranks_sample_alike`: see `Groups`; by default on GPUs, where a token on its way through the host would keep the
        device waiting. Raises `ConfigError` for an address that is not this machine's, and for too little shared
        memory."""
        self._mesh, self._topology, self._device, self._engines = mesh, topology, device, engines
        if ranks_sample_alike is None:
            ranks_sample_alike = device.type == "cuda" and mesh.tp_size > 1
        self._ranks_sample_alike = ranks_sample_alike
        self._segment: Segment | None = None
        self._store: TCPStore | None = None
        address = None
        with ExitStack() as stack:
            if mesh.tp_rank == 0 and _can_share_memory(mesh.tp_ranks, topology, device):
                self._segment = Segment.create(mesh.tp_size)
                stack.callback(self._segment.close)
            if mesh.rank == 0 and (_needs_store(mesh, topology, device) or (needs_store and mesh.world_size > 1)):
                self._store, address = bind_store(listen_address(mesh.rank, topology))
            stack.pop_all()
        self.opened = GroupOpened(store=address, segment=None if self._segment is None else self._segment.handle)
        """The handles that the other ranks need to join."""

    def join(self, opened: Sequence[GroupOpened], *, timeout: float) -> Groups:
        """Join the groups, given the handles of every rank, by rank. All ranks must call this; it returns when this
        rank's connections are made, and the groups own the opened resources from then on. Raises `DeadlineExceeded`
        after `timeout` seconds."""
        mesh = self._mesh
        if self._store is None and (address := opened[0].store) is not None:
            self._store = reach_store(address, timeout=timeout)
        with ExitStack() as stack:
            tp = self._join_tp(opened, timeout)
            stack.callback(tp.close)
            stages = None
            if mesh.pp_size > 1:
                assert self._store is not None
                name = f"pipeline of tensor-parallel rank {mesh.tp_rank}"
                stages = StageLinks(mesh, self._connect(name, mesh.pp_rank, mesh.pp_size, timeout), self._store)
                stack.callback(stages.close)
                if self._device.type == "cuda":
                    stages.warm_up(self._device)
            stack.pop_all()
        store, self._store, self._segment = self._store, None, None
        address = self._topology.addresses[mesh.rank]
        experts = ExpertGroup(tp, engines=self._engines, address=address, device=self._device)
        return Groups(mesh, tp, stages, experts, store, ranks_sample_alike=self._ranks_sample_alike)

    def close(self) -> None:
        """Close the resources, unless groups own them; harmless when repeated."""
        if self._segment is not None:
            self._segment.close()
        self._store = None

    def _join_tp(self, opened: Sequence[GroupOpened], timeout: float) -> TensorParallelGroup:
        mesh = self._mesh
        if mesh.tp_size == 1:
            return SingleRankGroup()
        if not _can_share_memory(mesh.tp_ranks, self._topology, self._device):
            name = f"tensor-parallel group of stage {mesh.pp_rank}"
            group = TorchGroup(self._connect(name, mesh.tp_rank, mesh.tp_size, timeout))
            if self._device.type == "cuda":
                self._prepare(group, name)
            return group
        if self._segment is not None:
            return self._segment.join()
        handle = opened[mesh.tp_ranks[0]].segment
        assert handle is not None, "the first rank of a group on one node creates its memory"
        return Segment.attach(handle, rank=mesh.tp_rank, num_ranks=mesh.tp_size)

    def _prepare(self, group: TorchGroup, name: str) -> None:
        """Do now what a group of GPUs does at its first use, and find the fastest way for small sums."""
        device, store = self._device, self._store
        assert store is not None, "rank 0 binds the store"

        def make() -> SmallSum:
            own = PrefixStore(f"{name}/small sums", store)
            return SymmetricSum(name, rank=group.rank, size=group.size, device=device, store=own)

        on_one_node = len({self._topology.nodes[rank] for rank in self._mesh.tp_ranks}) == 1
        with ExitStack() as stack:
            stack.callback(group.close)
            group.warm_up(device)
            is_possible = on_one_node and SymmetricSum.is_possible(group.size, device)
            group.open_small_sum(make, is_possible=is_possible, device=device)
            stack.pop_all()

    def _connect(self, name: str, rank: int, size: int, timeout: float) -> TorchProcessGroups:
        assert self._store is not None, "rank 0 binds the store"
        host = listen_address(self._mesh.rank, self._topology)
        return TorchProcessGroups(
            self._store, name, rank=rank, size=size, host=host, device=self._device, timeout=timeout
        )


def _can_share_memory(ranks: Sequence[int], topology: Topology, device: torch.device) -> bool:
    on_one_node = len({topology.nodes[rank] for rank in ranks}) == 1
    return len(ranks) > 1 and on_one_node and device.type == "cpu" and supports_shared_memory()


def _needs_store(mesh: Mesh, topology: Topology, device: torch.device) -> bool:
    stages = [Mesh(rank=pp * mesh.tp_size, tp_size=mesh.tp_size, pp_size=mesh.pp_size) for pp in range(mesh.pp_size)]
    uses_memory = all(_can_share_memory(stage.tp_ranks, topology, device) for stage in stages)
    return mesh.pp_size > 1 or (mesh.tp_size > 1 and not uses_memory)


def listen_address(rank: int, topology: Topology) -> str:
    """Return the address that this rank listens on; without other nodes, one that only this machine can reach."""
    return LOOPBACK if len(set(topology.nodes)) == 1 else topology.addresses[rank]
