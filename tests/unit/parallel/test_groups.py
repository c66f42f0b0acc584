"""The groups of workers: their kinds by topology, and the links between stages."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import NoneType

import pytest
import torch
from ranks import open_all, run_ranks, together, topology

from eagleray.errors import DeadlineExceeded
from eagleray.parallel.distributed import TorchGroup
from eagleray.parallel.group import SingleRankGroup
from eagleray.parallel.groups import Groups, OpenedGroups
from eagleray.parallel.mesh import Mesh
from eagleray.parallel.shared_memory import SharedMemoryGroup
from eagleray.parallel.stages import StageLinks

CPU = torch.device("cpu")


def kinds(groups: Groups) -> tuple[type, type]:
    return type(groups.tp), type(groups.stages)


def test_open_single_worker_opens_nothing():
    (opened,) = open_all(topology())
    assert (opened.opened.store, opened.opened.segment) == (None, None)
    assert kinds(opened.join([opened.opened], timeout=1)) == kinds(Groups.single()) == (SingleRankGroup, NoneType)


@pytest.mark.parametrize(
    ("where", "expected", "stores", "segments"),
    [
        (topology(tp=2), [(SharedMemoryGroup, NoneType)] * 2, [], [0]),
        (topology(pp=2), [(SingleRankGroup, StageLinks)] * 2, [0], []),
        (topology(tp=2, pp=2), [(SharedMemoryGroup, StageLinks)] * 4, [0], [0, 2]),
        (topology(tp=2, nodes="ab"), [(TorchGroup, NoneType)] * 2, [0], []),
        (topology(tp=2, pp=2, nodes="aabb"), [(SharedMemoryGroup, StageLinks)] * 4, [0], [0, 2]),
        (
            topology(tp=2, pp=2, nodes="aaab"),
            [(SharedMemoryGroup, StageLinks)] * 2 + [(TorchGroup, StageLinks)] * 2,
            [0],
            [0],
        ),
    ],
    ids=["tp", "pp", "both", "tp over nodes", "a stage on each node", "one stage over nodes"],
)
def test_join_uses_shared_memory_within_a_node_and_connections_elsewhere(where, expected, stores, segments):
    opened = open_all(where)
    handles = [one.opened for one in opened]
    assert [rank for rank, one in enumerate(handles) if one.store is not None] == stores
    assert [rank for rank, one in enumerate(handles) if one.segment is not None] == segments
    joined = together([lambda one=one: one.join(handles, timeout=20) for one in opened])
    assert [kinds(groups) for groups in joined] == expected
    for holder in [*joined, *opened, *joined, *opened]:
        holder.close()


def test_open_gpu_binds_a_store():
    opened = OpenedGroups(mesh=Mesh(rank=0, tp_size=2), topology=topology(tp=2), device=torch.device("cuda", 0)).opened
    assert opened.store is not None
    assert opened.segment is None


def test_all_reduce_sums_within_a_stage():
    def work(groups: Groups) -> list[float]:
        return groups.tp.all_reduce(torch.tensor([float(groups.mesh.rank)])).tolist()

    assert run_ranks(work, topology(tp=2, pp=2)) == [[1.0], [1.0], [5.0], [5.0]]


def test_stage_links_keep_the_order_of_hidden_states():
    def work(groups: Groups) -> list[float]:
        mesh, stages, seen = groups.mesh, groups.stages, []
        for step in range(20):
            shape = (step + 1, 64)
            if mesh.is_first_stage:
                hidden = torch.full(shape, float(step + 100 * mesh.tp_rank), dtype=torch.bfloat16)
            else:
                hidden = stages.receive_hidden(shape, torch.bfloat16, CPU) + 1
            if not mesh.is_last_stage:
                stages.send_hidden(hidden)
            seen.append(hidden.unique().item())
        return seen

    results = run_ranks(work, topology(tp=2, pp=3))
    for tp_rank in range(2):
        numbers = torch.arange(20) + 100 * tp_rank
        assert results[4 + tp_rank] == (numbers + 2).to(torch.bfloat16).tolist()


def test_stage_links_sends_do_not_wait():
    """A single thread sends everything before it receives anything, in both directions."""
    opened = open_all(topology(pp=2))
    handles = [one.opened for one in opened]
    first, last = together([lambda one=one: one.join(handles, timeout=20) for one in opened])
    for step in range(3):
        first.stages.send_hidden(torch.full((512, 256), float(step)))
        last.stages.send_tokens(torch.arange(step + 1))
    for step in range(500):
        last.stages.send_tokens(torch.full((64,), step))
    for step in range(3):
        assert first.stages.receive_tokens(step + 1).tolist() == list(range(step + 1))
        assert (last.stages.receive_hidden((512, 256), torch.float32, CPU) == step).all()
    for step in range(500):
        tokens = first.stages.receive_tokens(64)
        assert tokens.dtype == torch.int64
        assert (tokens == step).all()
    for holder in (first, last, *opened):
        holder.close()


@pytest.mark.parametrize("what", ["hidden", "tokens"])
def test_stage_links_silent_stage_times_out(what):
    opened = open_all(topology(pp=2))
    handles = [one.opened for one in opened]
    first, last = together([lambda one=one: one.join(handles, timeout=20) for one in opened])
    first, last = (
        StageLinks(groups.mesh, groups.stages._connections, groups.stages._store, timeout=0.3)
        for groups in (first, last)
    )
    with pytest.raises(DeadlineExceeded, match=r"0\.3 s"):
        if what == "hidden":
            last.receive_hidden((2, 3), torch.float32, CPU)
        else:
            first.receive_tokens(3)
    for holder in (first, last, *opened):
        holder.close()


def test_join_missing_worker_times_out():
    opened = open_all(topology(pp=2))
    handles = [one.opened for one in opened]
    with pytest.raises(DeadlineExceeded, match=r"the 2 ranks of pipeline of .* were not connected within 0\.3 s"):
        opened[0].join(handles, timeout=0.3)
    for one in opened:
        one.close()


def test_join_on_one_node_listens_on_loopback_only():
    before = listening()
    opened = open_all(topology(tp=2, pp=2))
    handles = [one.opened for one in opened]
    joined = together([lambda one=one: one.join(handles, timeout=20) for one in opened])
    assert {address for address, _ in listening() - before} == {"0100007F"}  # 127.0.0.1
    for holder in [*joined, *opened]:
        holder.close()


def listening() -> set[tuple[str, str]]:
    """Return (address, number) of the sockets on which this process listens."""
    own = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of listdir itself
            own.add(os.readlink(f"/proc/self/fd/{entry}"))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    state, number = 3, 9
    return {
        (line[1].split(":")[0], line[number])
        for line in lines
        if line[state] == "0A" and f"socket:[{line[number]}]" in own
    }


def test_join_leaves_no_names_in_shared_memory():
    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[5] for line in lines if "/dev/shm/" in line}

    before = mapped()
    assert all(names <= before for names in run_ranks(lambda groups: mapped(), topology(tp=2, pp=2)))
