"""The estimate of the memory that further engines take."""

from __future__ import annotations

import mmap
import os

import msgspec
import pytest
from fleet_machine import INFO

from eagleray.config.build import build_config
from eagleray.fleet.host_room import explain_memory_shortage
from eagleray.messages.membership import ProcessInfo
from eagleray.process.host_memory import own_bytes

GIB = 2**30


def engine(pid, *worker_pids, cache=0):
    workers = tuple(ProcessInfo(host="here", pid=worker) for worker in worker_pids)
    return msgspec.structs.replace(
        INFO, process=ProcessInfo(host="here", pid=pid), workers=workers, cache_bytes=cache * GIB
    )


ENGINES = [engine(1, 11, 12, cache=4), engine(2, 2, cache=2)]
OWN = {1: GIB, 11: 6 * GIB, 12: 6 * GIB, 2: 8 * GIB}


def explain(num_added, free, engines=ENGINES, **options):
    return explain_memory_shortage(
        num_added,
        engines,
        build_config(**options).cache,
        read_free=lambda: free * GIB,
        read_own=lambda pids: sum(OWN[pid] for pid in set(pids)),
    )


@pytest.mark.parametrize(
    ("num_added", "free", "options", "sentence"),
    [
        (1, 6, {}, None),
        (1, 5, {}, "1 engine more would take about 6.0 GiB of memory without caches, judged by those that run, but "
                   "5.0 GiB are free on this host: ask for fewer engines, free memory"),
        (2, 11, {}, "2 engines more would take about 12.0 GiB of memory without caches"),
        (1, 7, {"num_kv_blocks": 100}, "1 engine more would take about 8.0 GiB of memory, judged"),
        (1, 8, {"kv_cache_memory": "2GiB"}, None),
    ],
)  # fmt: skip
def test_memory_shortage_is_that_of_the_smallest_engine(num_added, free, options, sentence):
    explained = explain(num_added, free, **options)
    assert explained is None if sentence is None else explained.startswith(sentence)


def test_memory_shortage_untouched_cache_does_not_make_engines_free():
    small = [engine(1, cache=4)]
    assert explain(16, 2, engines=small) is None
    assert explain(17, 2, engines=small).startswith("17 engines more would take about 2.1 GiB")


def test_own_bytes_counts_what_a_process_has_for_itself_once():
    before = own_bytes([os.getpid()])
    with mmap.mmap(-1, 32 * 2**20) as memory:
        memory.write(b"x" * len(memory))
        assert own_bytes([os.getpid(), os.getpid(), 2**22 + 1]) - before > 30 * 2**20
