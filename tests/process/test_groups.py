"""Ranks that are processes, as workers are."""

from __future__ import annotations

import multiprocessing

import pytest
from group_members import DEADLINE, member
from ranks import topology

from eagleray.errors import ChannelClosed


class Ranks:
    """A process for each rank."""

    def __init__(self, where) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(where.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=member, args=(rank, where, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def tell(self, what) -> None:
        for pipe in self.pipes:
            pipe.send(what)

    def heard(self, rank: int):
        assert self.pipes[rank].poll(DEADLINE), f"rank {rank} has said nothing for {DEADLINE} s"
        return self.pipes[rank].recv()

    def all_heard(self) -> list:
        return [self.heard(rank) for rank in range(len(self.pipes))]

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join(DEADLINE)

    def close(self) -> None:
        for rank, pipe in enumerate(self.pipes):
            self.kill(rank)
            pipe.close()


@pytest.fixture
def start():
    started = []

    def start(where) -> Ranks:
        started.append(Ranks(where))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


@pytest.mark.parametrize("nodes", [None, "abcd"], ids=["one node", "four nodes"])
def test_a_pipeline_of_tensor_parallel_stages(start, nodes):
    ranks = start(topology(tp=2, pp=2, nodes=nodes))
    ranks.tell(ranks.all_heard())
    assert ranks.all_heard() == ["joined"] * 4
    ranks.tell("sums")
    assert ranks.all_heard() == [[1.0], [1.0], [5.0], [5.0]]
    ranks.tell("relay")
    assert ranks.all_heard() == [[7, 1], [1], [1], [2]]
    ranks.tell(None)
    for process in ranks.processes:
        process.join(DEADLINE)
        assert process.exitcode == 0


def test_a_killed_rank_of_another_node_is_noticed(start):
    ranks = start(topology(tp=2, nodes="ab"))
    ranks.tell(ranks.all_heard())
    assert ranks.all_heard() == ["joined"] * 2
    ranks.kill(1)
    ranks.pipes[0].send("sums")
    error = ranks.heard(0)
    assert isinstance(error, ChannelClosed)
    assert "all_reduce: tensor-parallel rank 0 of 2 with rank 1" in str(error)


def test_a_killed_stage_is_noticed(start):
    ranks = start(topology(pp=2))
    ranks.tell(ranks.all_heard())
    assert ranks.all_heard() == ["joined"] * 2
    ranks.kill(0)
    ranks.pipes[1].send("relay")
    error = ranks.heard(1)
    assert isinstance(error, ChannelClosed)
    assert "hidden states from stage 0 to stage 1" in str(error)


def test_memory_of_a_rank_that_has_ended(start):
    ranks = start(topology(tp=2))
    opened = ranks.all_heard()
    ranks.kill(0)
    ranks.pipes[1].send(opened)
    error = ranks.heard(1)
    assert isinstance(error, ChannelClosed)
    assert "rank 0 of the group" in str(error) and "is gone, or in another container" in str(error)
