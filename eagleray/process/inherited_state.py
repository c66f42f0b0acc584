"""State that a process passes to the programs that it starts. A fork server passes on what it was started with, so its
forks replace a fresh start only while this state is the same."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import msgspec

INHERITED_FIELDS = frozenset(
    {
        *("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn"),
        *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Cpus_allowed", "Mems_allowed"),
    }
)
"""Lines of /proc/thread-self/status that a program inherits."""


class InheritedState(msgspec.Struct, frozen=True):
    """State of the calling thread and its process that a program inherits, without its descriptors."""

    environment: dict[bytes, bytes]
    executable: str
    import_path: list[str]
    directory: tuple[int, int]
    """Device and inode of the current directory."""
    limits: list[tuple[int, int]]
    """Soft and hard limit of each resource."""
    scheduling: tuple[int, int]
    """Scheduling policy and nice value."""
    session: tuple[int, int]
    """Session and process group."""
    status: list[str]
    """Lines of `INHERITED_FIELDS`: identity, capabilities, masks of signals and of cores."""
    cgroup: str
    oom_score: str


def read_inherited_state() -> InheritedState:
    """Return the state of the calling thread. Raises `OSError` where the system does not tell."""
    here = os.stat(".")
    status = Path("/proc/thread-self/status").read_text().splitlines()
    numbers = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
    return InheritedState(
        environment=dict(os.environb),
        executable=sys.executable,
        import_path=list(sys.path),
        directory=(here.st_dev, here.st_ino),
        limits=[resource.getrlimit(number) for number in numbers],
        scheduling=(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)),
        session=(os.getsid(0), os.getpgid(0)),
        status=[line for line in status if line.partition(":")[0] in INHERITED_FIELDS],
        cgroup=Path("/proc/self/cgroup").read_text(),
        oom_score=Path("/proc/self/oom_score_adj").read_text(),
    )
