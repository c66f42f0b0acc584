"""The child processes of `test_groups_processes.py`: each is a rank that is controlled over a pipe."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from eagleray.messages.workers import Topology
from eagleray.parallel.groups import Groups, OpenedGroups
from eagleray.parallel.mesh import Mesh

DEADLINE = 60.0


def member(rank: int, where: Topology, pipe: Connection) -> None:
    """Open, join with the received handles, then do the named work until None is received."""
    torch.set_num_threads(1)
    mesh = Mesh(rank=rank, tp_size=where.tensor_parallel_size, pp_size=where.pipeline_parallel_size)
    opened = OpenedGroups(mesh=mesh, topology=where, device=torch.device("cpu"))
    pipe.send(opened.opened)
    try:
        groups = opened.join(pipe.recv(), timeout=DEADLINE)
        pipe.send("joined")
        while (work := pipe.recv()) is not None:
            pipe.send(WORK[work](groups))
        groups.close()
    except Exception as error:
        pipe.send(error)


def sums(groups: Groups) -> list[float]:
    """Run and check many operations of sizes below and above a buffer."""
    expected = sum(rank + 1 for rank in range(groups.tp.size))
    for size in [1, 5, 1024, 700_000] + [64] * 300:
        x = torch.full((size,), groups.tp.rank + 1.0)
        assert (groups.tp.all_reduce(x) == expected).all()
        gathered = groups.tp.gather(torch.full((2, 3), groups.tp.rank + 1.0))
        assert gathered is None or gathered[1].tolist() == [r + 1.0 for r in range(groups.tp.size) for _ in range(3)]
        assert groups.tp.broadcast(torch.full((size,), groups.tp.rank)).eq(0).all()
    return groups.tp.all_reduce(torch.tensor([float(groups.mesh.rank)])).tolist()


def relay(groups: Groups) -> list[int]:
    """Send hidden states to the last stage, and tokens back to the first rank."""
    mesh, stages = groups.mesh, groups.stages
    hidden = torch.full((3, 8), float(mesh.tp_rank))
    if not mesh.is_first_stage:
        hidden = stages.receive_hidden((3, 8), torch.float32, torch.device("cpu"))
    if not mesh.is_last_stage:
        stages.send_hidden(hidden + 1)
    elif mesh.is_sampler:
        stages.send_tokens(torch.tensor([7, int(hidden[0, 0])]))
    return stages.receive_tokens(2).tolist() if mesh.rank == 0 else hidden[0].int().unique().tolist()


WORK = {"sums": sums, "relay": relay}
