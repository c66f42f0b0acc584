"""The owner's side of a fork server: a process that has imported modules and forks children of this process on demand.

Owned by `fork_server_keeper`, or by a forked process that has children of its own (`child`).
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from eagleray.process.child_process import ChildProcess, ForkedProcess
from eagleray.process.fork_protocol import (
    MAX_DESCRIPTORS,
    MAX_PACKET_BYTES,
    ChildForked,
    ForkFailed,
    ForkRequest,
    FromForkServer,
    ServerReady,
    ServerUnusable,
)
from eagleray.process.inherited_state import InheritedState, read_inherited_state
from eagleray.process.subreaper import adopting_orphans

FORK_SECONDS = 1.0
"""Time for a fork, which takes about 10 ms. A server that needs longer hangs or was stopped."""

STANDARD_STREAMS = (1, 2)


class NoFork(Exception):
    """The fork server has forked no child; the child has to be started fresh."""


class BrokenForkServer(NoFork):
    """The fork server is of no use from now on."""


class ForksChildren(Protocol):
    """A fork server, or a keeper of one."""

    def fork(self, child_socket: socket.socket, words: Sequence[str], pass_fds: Sequence[int]) -> int:
        """Fork a child of this process, and return its process id.

        The child gets `child_socket`, this process's standard output and error, and `pass_fds` by their numbers.
        `words`: its command line. Raises `NoFork`.
        """


class ForkServer:
    """A running fork server, `process`, which inherited `state` from this one and has the other end of `sock`."""

    def __init__(
        self, sock: socket.socket, process: ChildProcess, state: InheritedState, *, is_ready: bool = False
    ) -> None:
        self.process = process
        self._socket = sock
        self._state = state
        self._is_ready = is_ready
        self._lock = threading.Lock()

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the modules are imported. Raises `BrokenForkServer`, or `NoFork` if another server would be of no
        use either."""
        message = self._receive(timeout)
        if isinstance(message, ServerUnusable):
            raise NoFork(message.reason)
        assert isinstance(message, ServerReady)
        self._is_ready = True

    def fork(self, child_socket: socket.socket, words: Sequence[str], pass_fds: Sequence[int]) -> int:
        """See `ForksChildren`."""
        if not self._is_ready:
            raise NoFork("it is not ready")
        try:
            if read_inherited_state() != self._state:
                raise BrokenForkServer("the environment of this process has changed since it was started")
            for number in STANDARD_STREAMS:
                os.fstat(number)
            with self._lock, adopting_orphans():
                return self._fork(child_socket, words, pass_fds)
        except OSError as error:
            raise NoFork(str(error)) from None

    def _fork(self, child_socket: socket.socket, words: Sequence[str], pass_fds: Sequence[int]) -> int:
        packet = msgspec.msgpack.encode(ForkRequest(words=list(words), numbers=list(pass_fds)))
        descriptors = [child_socket.fileno(), *STANDARD_STREAMS, *pass_fds]
        if len(packet) > MAX_PACKET_BYTES or len(descriptors) > MAX_DESCRIPTORS:
            raise NoFork(f"the request has {len(packet)} bytes and {len(descriptors)} descriptors")
        self._socket.settimeout(FORK_SECONDS)
        try:
            socket.send_fds(self._socket, [packet], descriptors)
        except OSError as error:
            raise BrokenForkServer(f"it has exited ({error})") from None
        match self._receive(FORK_SECONDS):
            case ChildForked(pid):
                return pid
            case ForkFailed(reason):
                raise NoFork(reason)
            case other:
                raise BrokenForkServer(f"it sent {type(other).__name__}")

    def _receive(self, timeout: float) -> FromForkServer:
        deadline = time.monotonic() + timeout
        poller = select.poll()  # not `select`: descriptors may have any number
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise BrokenForkServer(f"no answer within {timeout:g} s")
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except OSError as error:
            raise BrokenForkServer(f"its connection broke ({error})") from None
        if not packet:
            raise BrokenForkServer("it has exited")
        message: FromForkServer = msgspec.msgpack.decode(packet, type=FromForkServer)
        return message

    def close(self) -> None:
        """Kill the process and wait for its exit. A child that it reports only now is killed too."""
        self.process.kill()
        self.process.wait()
        with self._lock:
            with suppress(BrokenForkServer):
                while True:
                    message = self._receive(0.0)
                    if isinstance(message, ChildForked):
                        late = ForkedProcess(message.pid)
                        late.kill()
                        late.wait()
            self._socket.close()
