"""Threads and cores of a worker."""

from __future__ import annotations

import os

import pytest
import torch

from eagleray.worker.device import cores_of, cpu_quota, set_threads


@pytest.fixture(autouse=True)
def no_quota(monkeypatch):
    """Have workers see no limit of this machine's container."""
    monkeypatch.setattr("eagleray.worker.device.cpu_quota", lambda: None)


def make_cpus(path, places):
    for core, (package, number) in enumerate(places):
        topology = path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{number}\n")
    return path


def test_cores_of_both_threads_of_a_core_go_to_one_worker(tmp_path):
    cpus = make_cpus(tmp_path, [(0, 0), (0, 1), (0, 0), (0, 1)])
    assert cores_of(range(4), num_workers=2, index=0, cpus=cpus) == [0, 2]
    assert cores_of(range(4), num_workers=2, index=1, cpus=cpus) == [1, 3]


def test_cores_of_worker_stays_on_one_socket(tmp_path):
    cpus = make_cpus(tmp_path, [(0, 0), (1, 0), (0, 1), (1, 1)])
    assert cores_of(range(4), num_workers=2, index=0, cpus=cpus) == [0, 2]
    assert cores_of(range(4), num_workers=2, index=1, cpus=cpus) == [1, 3]


def test_cores_of_divides_only_usable_cores(tmp_path):
    """Cores that do not divide evenly stay unused."""
    shares = [cores_of([3, 5, 6, 7, 9], num_workers=2, index=index, cpus=tmp_path) for index in (0, 1)]
    assert shares == [[3, 5], [6, 7]]


def test_set_threads_workers_that_divide_all_cores_are_bound():
    usable, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        share = len(usable) // 2
        assert set_threads(None, num_workers=2, index=1) == max(1, share)
        assert torch.get_num_threads() == max(1, share)
        if share:
            assert len(os.sched_getaffinity(0)) == share
    finally:
        os.sched_setaffinity(0, usable)
        torch.set_num_threads(threads)


def test_set_threads_given_number_or_single_worker_is_not_bound():
    usable, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        assert set_threads(1, num_workers=2, index=0) == 1
        assert set_threads(None, num_workers=1, index=0) == len(usable)
        assert os.sched_getaffinity(0) == usable
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "350000 100000\n"}, 3.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cpu_quota_is_read_from_both_versions_of_cgroups(tmp_path, files, quota):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_set_threads_takes_no_more_than_the_quota_of_the_container(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("eagleray.worker.device.cpu_quota", lambda: 1.5)
    try:
        assert set_threads(None, num_workers=1, index=0) == 1
        assert set_threads(3, num_workers=1, index=0) == 3
    finally:
        torch.set_num_threads(before)
