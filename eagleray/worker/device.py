"""The device that a worker computes on, and on CPUs its threads and the cores they run on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from eagleray.errors import ConfigError

CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")


def choose_device(wanted: str, index: int | None = None) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda` and make it the current one; `index` is the number of the GPU.
    Raises `ConfigError` if there is no such device."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("option `device`: cuda was asked for, but torch sees no CUDA device here; use cpu or auto")
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        count = torch.cuda.device_count()
        if index is not None and index >= count:
            raise ConfigError(
                f"worker {index} of this node needs a GPU of its own, but torch sees {count}, numbered from 0: lower "
                "`tensor_parallel_size`, `pipeline_parallel_size` or `data_parallel_size`"
            )
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def set_threads(num_threads: int | None, *, num_workers: int, index: int) -> int:
    """Set the number of torch's threads and return it; by default it is the worker's share of the cores that this
    process may run on, and of the processor time that its container may use.

    `num_workers` workers of this host use these cores, and this one is number `index`. If they divide all the cores,
    each is bound to its own: threads of two workers on one core would wait for each other at every barrier. Applies to
    the calling thread and to threads that it starts later.
    """
    usable = os.sched_getaffinity(0)
    share = len(usable) // num_workers
    quota = cpu_quota()
    count = num_threads or max(1, share if quota is None else min(share, int(quota / num_workers)))
    if num_threads is None and num_workers > 1 and share > 0:
        os.sched_setaffinity(0, cores_of(usable, num_workers=num_workers, index=index))
    torch.set_num_threads(count)
    return count


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return the number of cores whose time the container may use, by cgroups of version 2 or 1; None without a limit.

    A process sees all cores of the host nevertheless. With a thread on each, all of them would stop when the time of a
    period is used up.
    """
    for directory, files in ((cgroup, ["cpu.max"]), (cgroup / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"])):
        try:
            quota, period = " ".join((directory / name).read_text() for name in files).split()
        except OSError:
            continue
        return None if quota in ("max", "-1") else int(quota) / int(period)
    return None


def cores_of(usable: Iterable[int], *, num_workers: int, index: int, cpus: Path = CPUS) -> list[int]:
    """Return the cores of worker number `index`. They are neighbours, so that where possible both threads of a physical
    core, and the cores of a socket, belong to one worker."""

    def position(core: int) -> tuple[int, int, int]:
        return (
            _read(cpus / f"cpu{core}/topology/physical_package_id"),
            _read(cpus / f"cpu{core}/topology/core_id"),
            core,
        )

    ordered = sorted(usable, key=position)
    share = len(ordered) // num_workers
    return ordered[index * share : (index + 1) * share]


def _read(file: Path) -> int:
    """Return the number in `file`, 0 if the system does not provide it."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0
