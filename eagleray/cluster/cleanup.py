"""Removal of a directory after its process was killed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

SHELL = "/bin/sh"

SCRIPT = 'exec 3<&0; (read -r line <&3; rm -rf -- "$0") &'
"""The `read` returns when no process holds the other end of the pipe. The waiting shell is a child of init, not of this
process, because Ray kills the children of an actor that exits."""


def remove_with_process(path: Path) -> Callable[[], None]:
    """Have `path` removed when this process is gone, however it exits, or when the returned function is called."""
    read_end, write_end = os.pipe()  # programs that we start do not inherit it
    try:
        subprocess.run(
            [SHELL, "-c", SCRIPT, str(path)],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return partial(os.close, write_end)
