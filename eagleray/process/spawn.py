"""The parent's side: spawn a process, receive its reports, notice its exit at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence

import msgspec

from eagleray.errors import ProcessCrashed
from eagleray.identity import ProcessId
from eagleray.log import LogSettings, get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import ChildToParent
from eagleray.process.child_process import ChildProcess, ForkedProcess
from eagleray.process.fork_server import ForksChildren, NoFork
from eagleray.process.program import child_words, group_signals_blocked
from eagleray.process.spawn_protocol import EXIT_FRAME, SpawnSpec, read_frame, write_frame

logger = get_logger(__name__)

CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Signals that a process causes itself. SIGABRT is not among them, because Ray aborts drivers of a lost cluster."""

RAY_WORKER_VARIABLE = "RAY_JOB_ID"
"""Variable of a process that Ray started for tasks or actors. Before such a process exits, Ray kills its children."""


class Child:
    """A process of this host, a fork of `fork_server` or started fresh (no fork of our state, no re-import of the
    user's main module).

    `on_message` and `on_exit` are called from a thread of this child's own: first the messages in order, then
    `on_exit(cause)` exactly once, when the process has exited and was reaped.
    """

    def __init__(
        self,
        *,
        target: str,
        member: ProcessId,
        payload: bytes,
        log: LogSettings,
        runtime_dir: str,
        on_message: Callable[[ChildToParent], None],
        on_exit: Callable[[Failure], None],
        pass_fds: Sequence[int] = (),
        fork_server: ForksChildren | None = None,
        has_children: bool = False,
    ) -> None:
        self.label = member.label
        self._on_message = on_message
        self._on_exit = on_exit
        self._socket, self._process = _start(self.label, pass_fds, fork_server)
        self._pidfd = _open_pidfd(self._process.pid)
        spec = SpawnSpec(
            target=target,
            member=member,
            log=log,
            payload=payload,
            runtime_dir=runtime_dir,
            has_children=has_children,
        )
        with contextlib.suppress(OSError):  # it has exited already: the watcher is about to report it
            write_frame(self._socket, msgspec.msgpack.encode(spec))
        self._watcher = threading.Thread(target=self._watch, name=f"watch-{self.label}", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Have the process send SIGTERM to itself; it ignores the SIGTERM of others."""
        with contextlib.suppress(OSError):  # it has exited already
            write_frame(self._socket, EXIT_FRAME)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self, timeout: float) -> bool:
        """Whether the process exited, and `on_exit` was called, within `timeout` seconds."""
        self._watcher.join(timeout)
        return not self._watcher.is_alive()

    def _wait_for_message(self) -> bool:
        """Wait for a message or the exit. Returns whether there may be a message.

        A fork of the process (made by a library that it uses) may keep the socket open beyond its exit, so the exit
        itself is watched too.
        """
        if self._pidfd is None:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._pidfd, select.POLLIN)
        return any(descriptor == self._socket.fileno() for descriptor, _ in poller.poll())

    def _watch(self) -> None:
        codec: Codec[ChildToParent] = Codec(ChildToParent)
        while self._wait_for_message() and (frame := read_frame(self._socket)) is not None:
            self._on_message(codec.decode([frame]))
        returncode = self._process.wait()
        self._socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._on_exit(_exit_cause(returncode))


def _start(
    label: str, pass_fds: Sequence[int], fork_server: ForksChildren | None
) -> tuple[socket.socket, ChildProcess]:
    """Start a process and return it with this end of its socket pair. Raises `OSError`."""
    if fork_server is not None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                return ours, ForkedProcess(fork_server.fork(theirs, child_words(theirs.fileno(), label), pass_fds))
        except NoFork as error:
            ours.close()  # a fork that comes too late exits then
            logger.debug("%s is started fresh: %s", label, error)
    ours, theirs = socket.socketpair()
    try:
        with theirs, group_signals_blocked():
            return ours, subprocess.Popen(
                child_words(theirs.fileno(), label),
                pass_fds=(theirs.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
            )
    except BaseException:
        ours.close()
        raise


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process has exited, or None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def explain_exit(returncode: int | None) -> str:
    """Describe how a process exited, for a log line. None: the system does not tell."""
    if returncode is None:
        return "it ended, with an exit code that is not known"
    if returncode >= 0:
        return f"it ended with exit code {returncode}"
    known = -returncode in {number.value for number in signal.Signals}  # real-time signals have no names
    name = signal.Signals(-returncode).name if known else f"signal {-returncode}"
    hint = ""
    if returncode == -signal.SIGKILL:
        stops_actor = "Ray stops its actor, or " if RAY_WORKER_VARIABLE in os.environ else ""
        hint = f" (perhaps {stops_actor}the machine ran out of memory)"
    return f"it was killed by {name}{hint}"


def _exit_cause(returncode: int | None) -> Failure:
    reason = explain_exit(returncode)
    has_crashed = returncode is not None and -returncode in CRASH_SIGNALS
    return Failure.of(ProcessCrashed(reason)) if has_crashed else Failure.noticed(reason)
