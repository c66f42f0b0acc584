"""A member of the expert group is killed: ranks that wait for it notice it at once, and continue with its successor."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from expert_members import DEADLINE, exchange, make_group, member, open_group

from eagleray.errors import ExpertGroupBroken

HERE = ("here", "127.0.0.1")
ELSEWHERE = ("elsewhere", "127.0.0.2")


class Member:
    def __init__(self, epoch: int, where: tuple[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=member, args=(epoch, *where, theirs), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(DEADLINE), f"the member of epoch {epoch} has opened nothing for {DEADLINE} s"
        self.opened = self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE)
        self.pipe.close()


@pytest.mark.parametrize(
    "where",
    [
        # tests/e2e/test_expert_parallel.py kills engines on one node
        pytest.param(HERE, id="one node", marks=pytest.mark.grid),
        pytest.param(ELSEWHERE, id="two nodes"),
    ],
)
def test_expert_group_killed_member_is_noticed_and_replaced(where):
    own_node, own_address = ("here", where[1])
    group = make_group(0, own_address)
    for epoch in (1, 2):
        other = Member(epoch, where)
        own = open_group(group, epoch, own_node, own_address)
        other.pipe.send(own)
        group.join(epoch, [own, other.opened], timeout=DEADLINE)
        if epoch == 1:
            exchange(group)
        for _ in range(3):
            assert group.agree(False, 7) == (True, [7, epoch])
        other.kill()
        with pytest.raises(ExpertGroupBroken, match=f"the group of epoch {epoch} is broken"):
            for _ in range(3):  # it may have published something more before it was killed
                group.agree(False, 7)
        with pytest.raises(ExpertGroupBroken):
            group.all_reduce(torch.zeros(1))
    group.leave()


def test_join_member_killed_before_joining_breaks_the_group():
    group = make_group(0, HERE[1])
    other = Member(1, HERE)
    own = open_group(group, 1, *HERE)
    other.kill()
    group.join(1, [own, other.opened], timeout=DEADLINE)
    with pytest.raises(ExpertGroupBroken, match=r"expert rank 1 of 2 is gone: process \d+ has ended"):
        group.agree(False, 1)
    group.leave()
