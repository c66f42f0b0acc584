"""The command line by which other programs show a process (`ps`), replaced in place: forks of one process have the
memory of its own command line."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

START_FIELD, END_FIELD = 48, 49
"""Numbers of the fields of /proc/PID/stat that bound the memory of the command line, see proc(5)."""


def show_command_line(words: Sequence[str]) -> None:
    """Replace the command line that /proc shows. Raises `OSError` where the system does not tell its address, and
    `ValueError` if `words` take more room than the command line of the process's start."""
    # the second field is a name in parentheses, which may contain anything
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[START_FIELD - 3]), int(fields[END_FIELD - 3])
    line = b"".join(word.encode() + b"\0" for word in words)
    if not start or len(line) > end - start:
        raise ValueError(f"a command line of {len(line)} bytes does not fit into {end - start}")
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
