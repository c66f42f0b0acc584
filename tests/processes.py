"""Facts about processes, from the system."""

from __future__ import annotations

import contextlib
from pathlib import Path

hidden_children: set[int] = set()
"""Fork servers that belong to the run of the tests, and to no test."""


def children_of(pid: int) -> list[int]:
    """Return the live processes that `pid` has started, in rising order. Its threads may come and go meanwhile."""
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, (thread / "children").read_text().split())
    return sorted(set(children) - hidden_children)
