"""Connections by gloo when a rank leaves, or is killed without gloo noticing it. Ranks are threads of this process."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from ranks import together
from torch.distributed import HashStore, ReduceOp

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.parallel.gloo_connections import GlooConnections

DEADLINE = 60.0
NEVER = 3600.0
"""Time limit of operations that must end without it."""


def connect(size: int) -> list[GlooConnections]:
    store = HashStore()
    options: Any = {"size": size, "host": "127.0.0.1", "timeout": DEADLINE}
    return together([partial(GlooConnections, store, "test", rank=rank, **options) for rank in range(size)])


def broadcast(group: Any) -> Any:
    return group.broadcast(torch.zeros(3), 0, timedelta(seconds=NEVER))


class LostWork:
    """An operation that gloo does not end although a connection is broken."""

    def __init__(self) -> None:
        self.is_dropped = threading.Event()

    def wait(self, timeout: timedelta = timedelta(seconds=DEADLINE)) -> None:
        self.is_dropped.wait(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


def test_gloo_operation_that_gloo_never_ends_names_the_rank_that_left() -> None:
    first, second, third = connect(3)
    lost = LostWork()
    wait = first.begin("sum of rank 0", lambda group: lost, NEVER)
    third.close()
    with pytest.raises(ChannelClosed, match=r"^sum of rank 0: the connection to rank 2 is broken$"):
        wait()
    first.close()
    second.close()
    lost.is_dropped.set()


def test_gloo_operation_of_a_slow_rank_goes_on_after_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagleray.parallel.gloo_connections.CONNECTION_CHECK_SECONDS", 0.001)
    ranks = connect(2)
    checks: list[list[int]] = []
    is_checked = threading.Event()

    def count(check: Callable[[], list[int]]) -> list[int]:
        checks.append(check())
        if len(checks) == 20:
            is_checked.set()
        return checks[-1]

    monkeypatch.setattr(ranks[0], "_broken_ranks", partial(count, ranks[0]._broken_ranks))
    x = [torch.full((3,), rank + 1.0) for rank in range(2)]
    limit = timedelta(seconds=DEADLINE)

    def add_up(rank: int) -> None:
        for _ in range(3):
            ranks[rank].begin("sum", lambda group: group.allreduce(x[rank], ReduceOp.SUM, limit), DEADLINE)()

    def add_up_late() -> None:
        assert is_checked.wait(DEADLINE)
        add_up(1)

    together([partial(add_up, 0), add_up_late])
    assert [part.tolist() for part in x] == [[12.0] * 3] * 2
    assert not any(checks), "the connection was never broken"
    for rank in ranks:
        rank.close()


def test_gloo_closed_while_an_operation_waits_ends_it_on_all_ranks() -> None:
    first, second, third = ranks = connect(3)
    begun = threading.Barrier(3)

    def receive(connections: GlooConnections) -> None:
        wait = connections.begin("broadcast", broadcast, NEVER)
        begun.wait(DEADLINE)
        wait()

    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(receive, connections) for connections in (second, third)]
        begun.wait(DEADLINE)
        second.close()
        with pytest.raises(ChannelClosed, match="broadcast: the group was closed"):
            waiting[0].result(DEADLINE)
        first.close()
        with pytest.raises(ChannelClosed, match="broadcast: the connection"):
            waiting[1].result(DEADLINE)
    for connections in ranks:
        connections.close()
        with pytest.raises(ChannelClosed, match="the group was closed"):
            connections.begin("broadcast", broadcast, NEVER)


def test_gloo_operation_without_its_other_rank_stops_at_the_deadline() -> None:
    first, second = connect(2)
    wait = second.begin("broadcast of rank 0", broadcast, 0.2)
    with pytest.raises(DeadlineExceeded, match=r"broadcast of rank 0: has waited for 0\.2 s"):
        wait()
    first.close()
    second.close()


def test_gloo_failed_operation_does_not_keep_its_connections() -> None:
    """Connections that wait for the garbage collector keep their threads and sockets."""
    first, second = connect(2)
    gc.collect()
    gc.disable()
    try:
        wait = second.begin("broadcast", broadcast, NEVER)
        first.close()
        with contextlib.suppress(ChannelClosed):
            wait()
        second.close()
        closed = weakref.ref(second)
        del second, wait
        assert closed() is None
    finally:
        gc.enable()
