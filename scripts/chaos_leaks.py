"""Leaks of a server: processes, shared memory, directories, sockets, and objects in Ray or on other hosts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from chaos_server import Server

SHARED_MEMORY = Path("/dev/shm")
RAY_SEMAPHORES = ("sem.hdr", "sem.obj")

EXIT_SECONDS = 5.0
"""Time within which orphans exit by themselves."""


class Leaks:
    """Comparison of the machine before the server starts, when this is made, with the time after its exit.

    `elsewhere` returns the names of everything that the server has left in a Ray cluster and on other hosts.
    """

    def __init__(self, elsewhere: Callable[[], list[str]] = list) -> None:
        self._elsewhere = elsewhere
        self._segments = segments()

    def find(self, server: Server) -> dict[str, list[str]]:
        """Return the leaks by kind; every list is empty if nothing is left."""
        deadline = time.monotonic() + EXIT_SECONDS
        while any((left := self._look(server)).values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _look(self, server: Server) -> dict[str, list[str]]:
        new = segments() - self._segments
        return {
            "processes": [str(pid) for pid in server.remaining_processes()],
            "shared memory": sorted(new - _held(new)) if new else [],
            "runtime directories": sorted(path.name for path in server.temporary.iterdir()),
            "sockets": _unix_sockets(server.tmpdir) + _listening(server.url),
            "elsewhere": self._elsewhere(),
        }


def segments() -> set[str]:
    """Return the names of all shared memory but the semaphores of Ray's graphs, which belong to any cluster here."""
    names = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
    return {name for name in names if not name.startswith(RAY_SEMAPHORES)}


def _held(names: set[str]) -> set[str]:
    """Return the names that a running process has mapped: they belong to other programs."""
    held: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                maps = (process / "maps").read_text(errors="replace")
            except OSError:
                continue
            held |= {name for name in names if f"{SHARED_MEMORY}/{name}" in maps}
    return held


def _unix_sockets(directory: str) -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sorted({line.rpartition(" ")[2] for line in lines if directory in line})


def _listening(url: str) -> list[str]:
    """Return the URL if its port still accepts connections."""
    where = urlsplit(url)
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return [url] if where.port and probe.connect_ex((where.hostname or "127.0.0.1", where.port)) == 0 else []
