"""Tidying up after a process that is killed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

SHELL = "/bin/sh"

SCRIPT = 'exec 3<&0; (read -r line <&3; rm -rf -- "$0") &'
"""The `read` ends when nobody holds the other end of the pipe any more. What waits is not a child of ours, but of init:
Ray kills the children of an actor that ends."""


def remove_with_process(path: Path) -> Callable[[], None]:
    """Have `path` removed when this process is gone, however it went, or when the result is called."""
    theirs, ours = os.pipe()  # programs that we start do not inherit it
    try:
        subprocess.run(
            [SHELL, "-c", SCRIPT, str(path)],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return partial(os.close, ours)
