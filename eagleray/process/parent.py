"""The child's connection to its parent."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from eagleray.identity import ProcessId
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import Bound, ChildToParent
from eagleray.process.fork_server import ForkServer
from eagleray.process.spawn_protocol import read_frame, write_frame

POLL_SECONDS = 1.0

ORPHAN_EXIT_SECONDS = 5.0
"""Time for an orphaned process to exit by itself before it is forced to."""


class Parent:
    """The child's end of the socket pair: sends reports; its closing means that the parent exited."""

    def __init__(self, sock: socket.socket, member: ProcessId, *, fork_server: ForkServer | None = None) -> None:
        self.fork_server = fork_server
        """Fork server for children of this process, which this process closes; None: they are started fresh."""
        self._socket = sock
        self._member = member
        self._codec: Codec[ChildToParent] = Codec(ChildToParent)
        self._lock = threading.Lock()
        self._has_reported_failure = False
        self.has_told_to_exit = False
        """Whether this process must exit, because the parent has told it to or has exited itself."""

    def report_bound(self, address: str) -> None:
        """Report the address of this process's inbox."""
        self._send(Bound(self._member, address))

    def report_failure(self, error: Exception) -> None:
        """Report the exception that makes this process exit, before the clean-up, which may take a while. Only the
        first report is sent."""
        if not self._has_reported_failure:
            self._has_reported_failure = True
            self._send(Ended(self._member, Failure.of(error)))

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Report an exception that leaves this block at once, before the clean-up that it passes on its way."""
        try:
            yield
        except Exception as error:
            self.report_failure(error)
            raise

    def _send(self, message: ChildToParent) -> None:
        """Send a message to the parent. If the parent has exited, nothing happens, because this process exits too."""
        frame = bytes(self._codec.encode(message)[0])
        try:
            with self._lock:
                write_frame(self._socket, frame)
        except OSError:
            pass

    def end_with_parent(self, runtime_dir: str) -> None:
        """From now on exit when the parent tells this process to, and also when the parent exits, however it does; then
        remove `runtime_dir` too."""
        threading.Thread(target=self._watch, args=(runtime_dir,), name="parent-watch", daemon=True).start()

    def _watch(self, runtime_dir: str) -> None:
        # The end of the stream shows the exit at once; the parent's id shows it even if a fork of the parent keeps the
        # stream open.
        parent = os.getppid()
        poller = select.poll()  # not `select`: the descriptor has the number that it has in the parent, of any size
        poller.register(self._socket, select.POLLIN)
        while os.getppid() == parent:
            if poller.poll(POLL_SECONDS * 1000):
                if read_frame(self._socket) is None:
                    break
                self._exit()
        shutil.rmtree(runtime_dir, ignore_errors=True)
        self._exit()
        threading.Event().wait(ORPHAN_EXIT_SECONDS)
        os._exit(1)  # the main thread is stuck in something that SIGTERM does not interrupt

    def _exit(self) -> None:
        """Interrupt the main thread, whose handler of SIGTERM exits."""
        self.has_told_to_exit = True
        os.kill(os.getpid(), signal.SIGTERM)
