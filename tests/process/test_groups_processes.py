"""Groups whose ranks are processes, as workers are."""

from __future__ import annotations

import multiprocessing

import pytest
from group_members import DEADLINE, member
from ranks import topology

from eagleray.errors import ChannelClosed


class Ranks:
    """The processes of all ranks."""

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

    def send(self, message) -> None:
        for pipe in self.pipes:
            pipe.send(message)

    def receive(self, rank: int):
        assert self.pipes[rank].poll(DEADLINE), f"rank {rank} has sent nothing for {DEADLINE} s"
        return self.pipes[rank].recv()

    def receive_all(self) -> list:
        return [self.receive(rank) for rank in range(len(self.pipes))]

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


# On one node: as in `tests/e2e/test_executors_agree.py`; on several: as in `tests/ray/test_ray_agree.py`.
@pytest.mark.grid
@pytest.mark.parametrize("nodes", [None, "abcd"], ids=["one node", "four nodes"])
def test_groups_pipeline_of_tensor_parallel_stages_computes(start, nodes):
    ranks = start(topology(tp=2, pp=2, nodes=nodes))
    ranks.send(ranks.receive_all())
    assert ranks.receive_all() == ["joined"] * 4
    ranks.send("sums")
    assert ranks.receive_all() == [[1.0], [1.0], [5.0], [5.0]]
    ranks.send("relay")
    assert ranks.receive_all() == [[7, 1], [1], [1], [2]]
    ranks.send(None)
    for process in ranks.processes:
        process.join(DEADLINE)
        assert process.exitcode == 0


def test_all_reduce_killed_rank_of_another_node_is_noticed(start):
    ranks = start(topology(tp=2, nodes="ab"))
    ranks.send(ranks.receive_all())
    assert ranks.receive_all() == ["joined"] * 2
    ranks.kill(1)
    ranks.pipes[0].send("sums")
    error = ranks.receive(0)
    assert isinstance(error, ChannelClosed)
    assert "all_reduce: tensor-parallel rank 0 of 2 with rank 1" in str(error)


def test_receive_hidden_killed_stage_is_noticed(start):
    ranks = start(topology(pp=2))
    ranks.send(ranks.receive_all())
    assert ranks.receive_all() == ["joined"] * 2
    ranks.kill(0)
    ranks.pipes[1].send("relay")
    error = ranks.receive(1)
    assert isinstance(error, ChannelClosed)
    assert "hidden states from stage 0 to stage 1" in str(error)


def test_join_memory_of_exited_rank_is_refused(start):
    ranks = start(topology(tp=2))
    opened = ranks.receive_all()
    ranks.kill(0)
    ranks.pipes[1].send(opened)
    error = ranks.receive(1)
    assert isinstance(error, ChannelClosed)
    assert "rank 0 of the group" in str(error) and "is gone, or in another container" in str(error)
