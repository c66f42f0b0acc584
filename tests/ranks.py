"""Several ranks of an engine. Each is a thread of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from eagleray.messages.workers import GroupOpened, Topology
from eagleray.parallel.groups import Groups, OpenedGroups
from eagleray.parallel.mesh import Mesh

DEADLINE = 60.0


def topology(*, tp: int = 1, pp: int = 1, nodes: Sequence[str] | None = None) -> Topology:
    """Return the topology of ranks, by default on one node."""
    nodes = list(nodes or ["node"] * (tp * pp))
    addresses = ["127.0.0.1"] * len(nodes)
    return Topology(tensor_parallel_size=tp, pipeline_parallel_size=pp, nodes=nodes, addresses=addresses)


def together(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the functions at the same time, and return their results. The first exception is raised at once; the other
    functions may wait forever."""
    done: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

    def run(number: int) -> None:
        try:
            done.put((number, functions[number](), None))
        except BaseException as error:
            done.put((number, None, error))

    for number in range(len(functions)):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    results = [None] * len(functions)
    for _ in functions:
        number, results[number], error = done.get(timeout=DEADLINE)
        if error is not None:
            raise error
    return results


def open_all(where: Topology, **options: Any) -> list[OpenedGroups]:
    sizes = {"tp_size": where.tensor_parallel_size, "pp_size": where.pipeline_parallel_size}
    return [
        OpenedGroups(mesh=Mesh(rank=rank, **sizes), topology=where, device=torch.device("cpu"), **options)
        for rank in range(where.world_size)
    ]


def run_ranks(function: Callable[[Groups], Any], where: Topology, **options: Any) -> list[Any]:
    """Return the result of `function` on each rank, given the groups of that rank. `options`: those of
    `OpenedGroups`."""
    opened = open_all(where, **options)
    handles: list[GroupOpened] = [one.opened for one in opened]
    groups = together([lambda one=one: one.join(handles, timeout=DEADLINE) for one in opened])
    results = together([lambda one=one: function(one) for one in groups])
    for holder in [*groups, *opened]:  # not if a rank has failed: others may still be in an operation
        holder.close()
    return results
