"""The expert group: it is formed for an epoch, breaks when a member is gone, and is formed again for the next epoch."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import partial

import msgspec
import pytest
import torch
from engine_ranks import EngineRanks, join_all, make_engines, open_epoch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import together

from eagleray.errors import ChannelClosed, DeadlineExceeded, ExpertGroupBroken
from eagleray.parallel.distributed import TorchGroup
from eagleray.parallel.expert_group import ExpertGroup, SharedMemoryOffer
from eagleray.parallel.group import RehearsalGroup, SingleRankGroup
from eagleray.parallel.groups import Groups
from eagleray.parallel.mesh import EnginePosition
from eagleray.parallel.process_watcher import ProcessWatcher
from eagleray.parallel.shared_memory import Segment, SegmentHandle, SharedMemoryGroup

NO_PROCESS = 2**22 + 1
"""A process id beyond the system's maximum."""

ONE_NODE, TWO_NODES = None, ["a", "b"]
PLACES = pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
SIZES = pytest.mark.parametrize("tp", [1, 2])


def close(engines: list[EngineRanks]) -> None:
    for engine in engines:
        engine.close()
        engine.close()


@PLACES
@SIZES
def test_expert_group_operations_span_engines(nodes, tp):
    engines = make_engines(2, tp, nodes=nodes)
    groups = join_all(engines, 1)
    size = 2 * tp
    assert [(group.rank, group.size, group.epoch, group.spans_engines) for group in groups] == [
        (rank, size, 1, True) for rank in range(size)
    ]
    assert {type(group._group) for group in groups} == {SharedMemoryGroup if nodes is None else TorchGroup}
    counts = [3, 0, 1, 2][:size]

    def work(group):
        x = torch.full((counts[group.rank], 4), float(group.rank))
        gathered = group.all_gather(x, counts)
        return gathered, group.reduce_scatter(gathered, counts), group.all_reduce(torch.ones(3)).tolist()

    for rank, (gathered, scattered, total) in enumerate(together([partial(work, group) for group in groups])):
        assert gathered[:, 0].tolist() == [float(other) for other in range(size) for _ in range(counts[other])]
        assert torch.equal(scattered, torch.full((counts[rank], 4), float(rank * size)))
        assert total == [size] * 3
    close(engines)


@PLACES
def test_agree_returns_any_busy_and_token_counts(nodes):
    engines = make_engines(2, 2, nodes=nodes)
    groups = join_all(engines, 1)
    for idle in ([True] * 4, [True, True, False, False], [False] * 4):
        agreed = together([partial(group.agree, idle[group.rank], 10 * group.rank) for group in groups])
        assert agreed == [(not all(idle), [0, 10, 20, 30])] * 4
    close(engines)


def test_expert_group_single_engine_needs_no_epoch():
    (engine,) = make_engines(1, 2)
    groups = engine.experts
    assert not any(group.spans_engines for group in groups)
    assert engine.open(1).opened[0].segment is None
    assert together([lambda group=group: group.agree(False, group.rank) for group in groups]) == [(True, [0, 1])] * 2
    together([lambda group=group: group.all_to_all(torch.ones(2, 3), [1, 1], [1, 1]) for group in groups])
    assert [group.bytes_sent["all_to_all"] for group in groups] == [12, 12]
    close([engine])
    with pytest.raises(ChannelClosed, match="closed") as caught:
        groups[0].all_reduce(torch.zeros(1))
    assert not isinstance(caught.value, ExpertGroupBroken), "the engine itself exits"


def test_expert_group_single_worker_never_leaves():
    experts = Groups.single().experts
    assert (experts.rank, experts.size, experts.agree(False, 5)) == (0, 1, (True, [5]))
    experts.leave()
    assert experts.agree(True, 0) == (False, [0])


@PLACES
@SIZES
def test_join_after_a_member_left_forms_the_next_epoch(nodes, tp):
    """The engine of rank 1 leaves in the middle of a step, and its successor joins."""
    engines = make_engines(2, tp, nodes=nodes)
    groups = join_all(engines, 1)
    stays, goes = groups[:tp], groups[tp:]
    together([lambda group=group: group.agree(False, 1) for group in groups])
    for group in goes:
        group.leave()
    causes = together([partial(broken_by, group, lambda group: group.agree(False, 1)) for group in stays])
    assert all("the group of epoch 1 is broken" in cause for cause in causes)
    causes = together([partial(broken_by, group, lambda group: group.agree(False, 1)) for group in groups])
    assert all("the group of epoch 1" in cause for cause in causes), "it stays broken"
    again = join_all(engines, 2)
    assert again == groups
    assert [group.epoch for group in groups] == [2] * 2 * tp
    assert together([lambda group=group: group.agree(True, 0) for group in groups]) == [(False, [0] * 2 * tp)] * 2 * tp
    close(engines)


def broken_by(group, operation) -> str:
    with pytest.raises(ExpertGroupBroken) as caught:
        operation(group)
    return str(caught.value)


OPERATIONS = {
    "all_gather": lambda group, rows: group.all_gather(torch.ones(rows[group.rank], 600), rows),
    "reduce_scatter": lambda group, rows: group.reduce_scatter(torch.ones(sum(rows), 600), rows),
    "all_reduce": lambda group, rows: group.all_reduce(torch.ones(50, 600)),
    "agree": lambda group, rows: group.agree(False, 3),
    "all_to_all": lambda group, rows: group.all_to_all(
        torch.ones(sum(rows), 600), rows, [rows[group.rank]] * group.size
    ),
}


@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
@settings(max_examples=8)
@given(
    names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6),
    rows=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    data=st.data(),
)
def test_expert_group_broken_in_the_same_operation_on_all_ranks_of_an_engine(nodes, names, rows, data):
    """A member leaves before any one operation of a step. The tensor-parallel ranks of the other engine compute a sum
    of their own before each operation: if one of them gave up earlier than the other, it would wait forever."""
    leaves = data.draw(st.integers(0, len(names)))
    engines = make_engines(2, 2, nodes=nodes)
    join_all(engines, 1)

    def stay(groups: Groups) -> int:
        for number, name in enumerate([*names, "agree"]):
            groups.tp.all_reduce(torch.ones(1))
            try:
                OPERATIONS[name](groups.experts, rows)
            except ExpertGroupBroken:
                return number
        raise AssertionError("the group was never broken")

    def go(groups: Groups, how_many: int) -> None:
        for name in names[:how_many]:
            groups.tp.all_reduce(torch.ones(1))
            OPERATIONS[name](groups.experts, rows)
        groups.experts.leave()

    steps = [partial(stay, groups) for groups in engines[0].groups]
    ends = [partial(go, groups, leaves) for groups in engines[1].groups]
    first, second, *_ = together([*steps, *ends])
    assert first == second
    if nodes is None:
        assert first >= leaves, "what a member has published before it left counts"
    assert together([lambda group=g.tp: group.all_reduce(torch.ones(1)).item() for g in engines[0].groups]) == [2, 2]
    close(engines)


def test_join_missing_member_times_out():
    engines = make_engines(2, 1)
    members = open_epoch(engines, 1)
    with pytest.raises(DeadlineExceeded, match=r"expert ranks 1 of 2 have not joined within 0\.2 s"):
        engines[0].experts[0].join(1, members, timeout=0.2)
    close(engines)


def test_join_member_that_left_breaks_the_group():
    """The member attaches the memory and leaves before it reaches the first round."""
    engines = make_engines(2, 1)
    members = open_epoch(engines, 1)
    first = engines[0].experts[0]
    offer = msgspec.msgpack.decode(members[0].opened[0].segment, type=SharedMemoryOffer)
    Segment.attach(offer.segment, rank=1, num_ranks=2).close()
    first.join(1, members, timeout=20)
    assert "expert rank 1 of 2 has left the group" in broken_by(first, lambda group: group.agree(False, 1))
    close(engines)


def test_join_memory_of_exited_member_breaks_the_group():
    engines = make_engines(2, 1)
    members = open_epoch(engines, 1)
    opened = members[0].opened[0]
    offer = msgspec.msgpack.decode(opened.segment, type=SharedMemoryOffer)
    handle = msgspec.structs.replace(msgspec.msgpack.decode(offer.segment, type=SegmentHandle), pid=NO_PROCESS)
    gone = msgspec.structs.replace(offer, pid=NO_PROCESS, segment=msgspec.msgpack.encode(handle))
    opened = msgspec.structs.replace(opened, segment=msgspec.msgpack.encode(gone))
    second = engines[1].experts[0]
    second.join(1, [msgspec.structs.replace(members[0], opened=[opened]), members[1]], timeout=20)
    assert "is gone" in broken_by(second, lambda group: group.agree(False, 1))
    close(engines)


def test_agree_before_join_is_broken():
    engines = make_engines(2, 1)
    with pytest.raises(ExpertGroupBroken, match="no group of engines that share the experts was joined yet"):
        engines[0].experts[0].agree(False, 1)
    close(engines)


def test_bytes_sent_adds_up_over_epochs():
    engines = make_engines(2, 1)
    for epoch in (1, 2):
        groups = join_all(engines, epoch)
        together([lambda group=group: group.all_to_all(torch.ones(2, 3), [1, 1], [1, 1]) for group in groups])
        assert [group.bytes_sent["all_to_all"] for group in groups] == [12 * epoch] * 2
    close(engines)


def test_expert_group_of_gpus_is_left_when_a_process_of_this_host_exits():
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    group = ExpertGroup(SingleRankGroup(), engines=EnginePosition(rank=0, size=2))
    assert group.check_processes() is None, "no group is joined"
    group._group = RehearsalGroup(0, 2)
    group._watcher = ProcessWatcher([os.getpid(), other.pid])
    assert group.check_processes() is None
    asked = itertools.count()
    group._wait_until(lambda: next(asked) == 2, timeout=10.0)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s"):
        group._wait_until(lambda: False, timeout=0.01)
    other.communicate(b"\n")
    with pytest.raises(ExpertGroupBroken, match="a process of this host has exited"):
        group._wait_until(lambda: False, timeout=10.0)
    with pytest.raises(ExpertGroupBroken, match="a process of this host has exited"):
        group._wait_until(lambda: True, timeout=10.0)  # leaving the group has ended the operation
    with pytest.raises(ExpertGroupBroken, match="a process of this host has exited"):
        group.all_reduce(torch.ones(2))
    assert group.check_processes() is None, "it is told once"
