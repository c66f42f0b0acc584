"""The child's view of its parent."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from eagleray.messages.codec import Codec
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import ChildToParent, Failed
from eagleray.process.spawn_protocol import read_frame, write_frame

POLL_SECONDS = 1.0

ORPHAN_SECONDS = 5.0
"""How long a process whose parent has died may take to end by itself."""


class Parent:
    """The other end of the socket pair: takes our reports, and its closing tells that the parent is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._codec: Codec[ChildToParent] = Codec(ChildToParent)
        self._lock = threading.Lock()
        self._has_told = False

    def tell(self, error: Exception) -> None:
        """This is what we end because of. To be said before the end, which may take its time; only the first counts."""
        if not self._has_told:
            self._has_told = True
            self.send(Failed(Failure.of(error)))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An exception that leaves this block is told at once; what it passes on its way is closed after that."""
        try:
            yield
        except Exception as error:
            self.tell(error)
            raise

    def send(self, message: ChildToParent) -> None:
        """Report to the parent; nothing happens if it is gone, because then we are ending anyway."""
        frame = bytes(self._codec.encode(message)[0])
        try:
            with self._lock:
                write_frame(self._socket, frame)
        except OSError:
            pass

    def end_with_parent(self, runtime_dir: str) -> None:
        """From now on this process ends when its parent does, however the parent ended, and tidies up after it."""
        threading.Thread(target=self._watch, args=(runtime_dir,), name="parent-watch", daemon=True).start()

    def _watch(self, runtime_dir: str) -> None:
        # The end of the stream tells at once; the parent's id tells even if some fork of the parent keeps its end open.
        parent = os.getppid()
        news = select.poll()  # not `select`: the descriptor has the number that it has in the parent, of any size
        news.register(self._socket, select.POLLIN)
        while os.getppid() == parent:
            if news.poll(POLL_SECONDS * 1000) and read_frame(self._socket) is None:
                break
        shutil.rmtree(runtime_dir, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(ORPHAN_SECONDS)
        os._exit(1)  # the main thread is stuck in something that SIGTERM does not interrupt
