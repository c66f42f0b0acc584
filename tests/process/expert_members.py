"""The child process of `test_expert_group_processes.py`: the only worker of an engine that shares the experts."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection

import torch

from eagleray.messages.workers import EngineOpened, Topology
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.group import SingleRankGroup
from eagleray.parallel.mesh import EnginePosition

DEADLINE = 60.0


def make_group(rank: int, address: str) -> ExpertGroup:
    return ExpertGroup(SingleRankGroup(), engines=EnginePosition(rank=rank, size=2), address=address)


def open_group(group: ExpertGroup, epoch: int, node: str, address: str) -> EngineOpened:
    where = Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=[node], addresses=[address])
    return EngineOpened(rank=group.rank, topology=where, opened=[group.open(epoch)])


def exchange(group: ExpertGroup) -> None:
    """Run and check many operations of random sizes below and above a buffer."""
    sizes = random.Random(0)
    for number in range(400):
        most = 400 if number % 50 == 0 else 3
        counts = [sizes.randint(0, most) for _ in range(2)]
        gathered = group.all_gather(torch.full((counts[group.rank], 700), group.rank + 1.0), counts)
        expected = torch.tensor([1.0] * counts[0] + [2.0] * counts[1])
        assert (gathered == expected[:, None]).all()
        assert (group.reduce_scatter(gathered, counts) == 2 * (group.rank + 1)).all()
        table = [[sizes.randint(0, most) for _ in range(2)] for _ in range(2)]
        sent = torch.arange(sum(table[group.rank])).repeat(500, 1).T + 1000 * group.rank
        received = group.all_to_all(sent, table[group.rank], [row[group.rank] for row in table])
        starts = [1000 * rank + sum(row[: group.rank]) for rank, row in enumerate(table)]
        expected = [start + row for rank, start in enumerate(starts) for row in range(table[rank][group.rank])]
        assert (received == torch.tensor(expected, dtype=torch.int64)[:, None]).all()


def member(epoch: int, node: str, address: str, pipe: Connection) -> None:
    """Open, join with the received members, then take steps until the process is killed."""
    torch.set_num_threads(1)
    group = make_group(1, address)
    own = open_group(group, epoch, node, address)
    pipe.send(own)
    group.join(epoch, [pipe.recv(), own], timeout=DEADLINE)
    if epoch == 1:
        exchange(group)
    while True:
        group.agree(True, epoch)
