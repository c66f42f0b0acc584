"""The GPUs that further engines need, and the estimate of the memory that they take."""

from __future__ import annotations

import mmap
import os

import msgspec
import pytest
from fleet_machine import INFO

from eagleray.config.build import build_config
from eagleray.fleet.host_room import explain_gpu_shortage, explain_memory_shortage
from eagleray.messages.membership import ProcessInfo
from eagleray.process import host_gpus
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


@pytest.mark.parametrize(
    ("num_added", "ranks", "options", "num_gpus", "shortage"),
    [
        (1, [0], {}, 0, None),  # engines compute on CPUs
        (1, [0], {}, 2, None),
        (1, [0, 1], {}, 2, "1 engine more would need 3 GPUs with those that run, but this host has 2"),
        (1, [0, 2], {}, 3, None),
        (2, [0, 2], {"tensor_parallel_size": 2}, 6, "2 engines more would need 8 GPUs"),
        (1, [0, 1], {"device": "cpu"}, 2, None),
        (1, [0, 1], {"executor": "ray"}, 2, None),
        (1, [4, 5], {"data_parallel_start_rank": 4, "data_parallel_size": 8}, 3, None),
    ],
)
def test_explain_gpu_shortage(num_added, ranks, options, num_gpus, shortage):
    explained = explain_gpu_shortage(num_added, ranks, build_config(**options), count_gpus=lambda: num_gpus)
    assert (explained is None) if shortage is None else explained.startswith(shortage)


def test_num_visible_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(host_gpus, "GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "0000:01:00.0").mkdir()
    counts = [host_gpus.num_visible_gpus()]
    for visible in ("", "0,1", "GPU-1a,-1,3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        counts.append(host_gpus.num_visible_gpus())
    assert counts == [1, 0, 2, 1]
