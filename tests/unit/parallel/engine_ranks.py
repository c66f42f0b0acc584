"""The workers of several engines that share the experts. Each worker is a thread of the test's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from ranks import together, topology

from eagleray.messages.workers import EngineOpened, GroupOpened, Topology
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.groups import Groups, OpenedGroups
from eagleray.parallel.mesh import SINGLE_ENGINE, EnginePosition, Mesh

DEADLINE = 30.0


@dataclass
class EngineRanks:
    """The workers of one engine."""

    rank: int
    topology: Topology
    groups: list[Groups]

    @property
    def experts(self) -> list[ExpertGroup]:
        return [groups.experts for groups in self.groups]

    def open(self, epoch: int) -> EngineOpened:
        opened: list[GroupOpened] = [group.open(epoch) for group in self.experts]
        return EngineOpened(rank=self.rank, topology=self.topology, opened=opened)

    def close(self) -> None:
        for groups in self.groups:
            groups.close()


def place(tp: int, node: str | None) -> Topology:
    """Return the topology of an engine on this node, which others reach by an address; by default all are on one
    node."""
    where = topology(tp=tp, nodes=[node or "node"] * tp)
    return where if node is None else msgspec.structs.replace(where, addresses=["127.0.0.2"] * tp)


def make_engines(num_engines: int, tp: int, *, nodes: Sequence[str] | None = None) -> list[EngineRanks]:
    """Make engines on `nodes`, one for each engine; by default all are on one node."""
    engines = []
    for rank in range(num_engines):
        where = place(tp, nodes[rank] if nodes else None)
        size = EnginePosition(rank=rank, size=num_engines) if num_engines > 1 else SINGLE_ENGINE
        opened = [
            OpenedGroups(mesh=Mesh(rank=worker, tp_size=tp), topology=where, device=torch.device("cpu"), engines=size)
            for worker in range(tp)
        ]
        handles = [one.opened for one in opened]
        groups = together([lambda one=one, handles=handles: one.join(handles, timeout=DEADLINE) for one in opened])
        engines.append(EngineRanks(rank, where, groups))
    return engines


def open_epoch(engines: Sequence[EngineRanks], epoch: int) -> list[EngineOpened]:
    return [engine.open(epoch) for engine in engines]


def join_all(engines: Sequence[EngineRanks], epoch: int) -> list[ExpertGroup]:
    """Open and join an epoch on all ranks, and return their groups in order."""
    members = open_epoch(engines, epoch)
    groups = [group for engine in engines for group in engine.experts]
    joins: list[Callable[[], Any]] = [
        lambda group=group: group.join(epoch, members, timeout=DEADLINE) for group in groups
    ]
    together(joins)
    return groups
