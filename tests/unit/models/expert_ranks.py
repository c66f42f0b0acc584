"""Engines that share experts. Every rank of every engine is a thread of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ranks import DEADLINE, together, topology

from eagleray.messages.workers import EngineOpened, Topology
from eagleray.models.moe.layout import ExpertOptions
from eagleray.parallel.groups import Groups, OpenedGroups
from eagleray.parallel.mesh import EnginePosition, Mesh

OPTIONS = {name: ExpertOptions(dispatch=name) for name in ("all-reduce", "all-gather", "all-to-all")}  # type: ignore[arg-type]


def open_engines(num_engines: int, *, tp: int = 1) -> list[list[Groups]]:
    """Return the groups of every rank of every engine, with the expert groups not yet joined."""
    engines = []
    for engine in range(num_engines):
        opened = [
            OpenedGroups(
                mesh=Mesh(rank=rank, tp_size=tp),
                topology=topology(tp=tp),
                device=torch.device("cpu"),
                engines=EnginePosition(rank=engine, size=num_engines),
            )
            for rank in range(tp)
        ]
        handles = [one.opened for one in opened]
        engines.append(together([partial(one.join, handles, timeout=DEADLINE) for one in opened]))
    return engines


def join_experts(engines: list[list[Groups]], *, epoch: int = 1) -> None:
    where: Topology = topology(tp=len(engines[0]))
    members = [
        EngineOpened(rank=rank, topology=where, opened=[groups.experts.open(epoch) for groups in ranks])
        for rank, ranks in enumerate(engines)
    ]
    everyone = [groups for ranks in engines for groups in ranks]
    together([partial(one.experts.join, epoch, members, timeout=DEADLINE) for one in everyone])


def run_engines(function: Callable[[Groups, int], Any], *, num_engines: int, tp: int = 1) -> list[list[Any]]:
    """Return the result of `function(groups, engine)` on each rank of each engine."""
    engines = open_engines(num_engines, tp=tp)
    join_experts(engines)
    everyone = [(groups, engine) for engine, ranks in enumerate(engines) for groups in ranks]
    results = together([partial(function, *place) for place in everyone])
    for groups, _ in everyone:
        groups.close()
    return [results[engine * tp : (engine + 1) * tp] for engine in range(num_engines)]
