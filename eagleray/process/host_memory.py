"""The memory of this host and of its processes, under the limits of the container."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path


def host_total_bytes() -> int:
    """Return the memory of the host in bytes with its swap, used or not, under the container's limit."""
    return min([_meminfo("MemTotal") + _meminfo("SwapTotal"), *(limit for limit, _ in _cgroup_limits())])


def host_free_bytes() -> int:
    """Return the bytes that this process could still take, in the smaller of host and cgroup."""
    return max(0, min([_meminfo("MemAvailable"), *(limit - used for limit, used in _cgroup_limits())]))


def own_bytes(pids: Iterable[int]) -> int:
    """Return the resident bytes that these processes would free at their exit. Files that they map do not count, since
    the system shares them. Processes that have exited count nothing."""
    return sum(_own_bytes(pid) for pid in set(pids))


def _own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _meminfo(name: str) -> int:
    """Return an entry of /proc/meminfo, which describes the whole host, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield the bytes that the container may use and does use, by cgroups of version 2 and 1, where there is a
    limit."""
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(used_file).read_text().strip()
        except OSError:
            continue
        if limit != "max":
            yield int(limit), int(used)
