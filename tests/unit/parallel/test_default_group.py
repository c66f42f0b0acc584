"""torch's default process group: it is of the engine's ranks, unless the process has one already.

It is global to a process, so several ranks of it are tested in processes (`test_worker_mixins.py`).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import open_all, together, topology
from torch.distributed import HashStore

from eagleray.parallel.default_group import BACKEND, open_default_group

CPU = torch.device("cpu")
LOCAL = {"host": "127.0.0.1", "device": CPU, "timeout": 20}


@pytest.fixture(autouse=True)
def no_group():
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_open_default_group_alone_needs_no_store():
    for _ in range(2):  # a process may have several engines one after another
        group = open_default_group(None, rank=0, size=1, **LOCAL)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, BACKEND)
        values = [None]
        dist.all_gather_object(values, {"rank": 0})
        dist.barrier()
        assert values == [{"rank": 0}]
        group.close()
        assert not dist.is_initialized()
        group.close()


def test_open_default_group_in_a_process_that_has_one_leaves_it(caplog):
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    theirs = dist.group.WORLD
    assert open_default_group(None, rank=3, size=4, **LOCAL) is None
    assert dist.group.WORLD is theirs
    (record,) = [record.getMessage() for record in caplog.records if record.name.startswith("eagleray")]
    assert "`torch.distributed.get_rank()` is 0, and the rank in the engine is 3" in record


def test_default_group_close_leaves_a_group_that_replaced_it():
    group = open_default_group(None, rank=0, size=1, **LOCAL)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group.close()
    assert dist.is_initialized()


def test_groups_open_default_is_closed_with_the_groups():
    (opened,) = open_all(topology(), needs_store=True)
    groups = opened.join([opened.opened], timeout=1)
    groups.open_default(**LOCAL)
    assert dist.get_world_size() == 1
    groups.close()
    assert not dist.is_initialized()
    groups.close()


def test_open_with_a_store_binds_one_that_all_ranks_reach():
    where = topology(tp=2)
    assert [one.opened.store for one in open_all(where)] == [None, None]
    opened = open_all(where, needs_store=True)
    handles = [one.opened for one in opened]
    assert [one.store is not None for one in handles] == [True, False]
    groups = together([lambda one=one: one.join(handles, timeout=20) for one in opened])
    for one in groups:
        one._store.set(f"rank {one.mesh.rank}", "here")
    assert {one._store.get(f"rank {rank}") for one in groups for rank in range(2)} == {b"here"}
    for one in [*groups, *opened]:
        one.close()
