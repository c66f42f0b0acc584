"""The cores that a worker computes on: how many threads it has, and where they may run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

CPUS = Path("/sys/devices/system/cpu")


def set_threads(num_threads: int | None, *, num_workers: int, index: int) -> int:
    """Let torch use this many threads, by default a worker's share of the cores that this process may run on -> how
    many.

    `num_workers`: how many workers of this host use them, of which this is number `index`. Workers that share out all
    the cores keep to their own: threads of two workers on one core would wait for each other at every barrier. Applies
    to the calling thread and to those that it will start.
    """
    usable = os.sched_getaffinity(0)
    share = len(usable) // num_workers
    count = num_threads or max(1, share)
    if num_threads is None and num_workers > 1 and share > 0:
        os.sched_setaffinity(0, cores_of(usable, num_workers=num_workers, index=index))
    torch.set_num_threads(count)
    return count


def cores_of(usable: Iterable[int], *, num_workers: int, index: int, cpus: Path = CPUS) -> list[int]:
    """The cores of worker number `index`: neighbours, so that the two threads of a physical core, and the cores of a
    socket, go to one worker where that is possible."""

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
    """0 where the system does not say."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0
