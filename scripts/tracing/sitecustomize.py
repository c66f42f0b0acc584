"""Record which functions of the package a process calls; Python imports this module before any other.

`scripts/trace_request.py` puts this folder on PYTHONPATH of a server and owns `EAGLERAY_TRACE`, a directory: its file
`window` holds one byte, the number of the open window or 0. Each process appends the first call of each function in
each window to a file of its own. The profiler is set before any thread starts, so every thread has it.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from types import FrameType


class Recorder:
    """Appends a line (window, label of the process, file, function) when a function is first called in a window."""

    def __init__(self, directory: str) -> None:
        with open(os.path.join(directory, "window"), "rb") as file:
            self._window = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._directory = directory
        self._seen: set[tuple[int, str, str]] = set()

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        window = self._window[0]
        if window == 0 or event != "call":
            return
        key = (window, frame.f_code.co_filename, frame.f_code.co_qualname)
        if key not in self._seen:
            self._seen.add(key)
            package = sys.modules.get("eagleray")  # other programs of the server have none
            if package is not None and key[1].startswith(package.__path__[0] + os.sep):
                self._write(window, os.path.relpath(key[1], package.__path__[0]), key[2])

    def _write(self, window: int, file_name: str, function: str) -> None:
        label = sys.argv[-1]  # the last argument of a spawned process
        line = f"{window}\t{label}\t{file_name}\t{function}\n"
        with open(os.path.join(self._directory, f"{os.getpid()}.calls"), "a") as file:
            file.write(line)


if directory := os.environ.get("EAGLERAY_TRACE"):
    recorder = Recorder(directory)
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
