"""Entry of every process that eagleray spawns, and of fork servers.

`spawn.Child` starts it with (file descriptor, label), `fork_server_keeper` with (file descriptor, modules).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import NoReturn

import msgspec

from eagleray.config.environment import limit_openmp_spinning
from eagleray.log import get_logger, setup_process_logging
from eagleray.process.child_process import ForkedProcess
from eagleray.process.command_line import show_command_line
from eagleray.process.exit import exit_without_teardown
from eagleray.process.fork_protocol import LABEL
from eagleray.process.fork_server import ForkServer
from eagleray.process.forking import import_modules, serve_forks
from eagleray.process.inherited_state import read_inherited_state
from eagleray.process.parent import Parent
from eagleray.process.spawn_protocol import GROUP_SIGNALS, TERMINAL_SIGNALS, SpawnSpec, read_frame

logger = get_logger(__name__)

PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    """Run a process that was started fresh."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)  # a program that this process starts and that outlives it must not hide its exit
    _exit(partial(_run, sock, is_fork=False))


def fork_server_main() -> NoReturn:
    """Run a fork server, and each of its forks."""
    owner = os.getppid()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    modules = sys.argv[2].split(",")
    _show_fork_server()
    _continue_when_parent_exits()
    limit_openmp_spinning()
    import_modules(sock, modules)
    _exit(lambda: _run(serve_forks(sock, owner), is_fork=True))


def _exit(run: Callable[[], int]) -> NoReturn:
    """Exit with the exit code that `run` returns, or the one that it exits with."""
    try:
        code = run()
    except SystemExit as error:
        if not isinstance(error.code, int):  # a text that Python prints
            raise
        code = error.code
    exit_without_teardown(code)


def _run(sock: socket.socket, *, is_fork: bool) -> int:
    """Run the target that the parent asks for and report an exception to the parent."""
    frame = read_frame(sock)
    if frame is None:  # the parent exited while it spawned this process
        return 1
    spec = msgspec.msgpack.decode(frame, type=SpawnSpec)
    forked = _fork_server(sock) if is_fork and spec.has_children else None  # while there is a single thread
    if isinstance(forked, socket.socket):  # this is a fork of the server
        return _run(forked, is_fork=False)
    setup_process_logging(spec.member.label, spec.log)
    parent = Parent(sock, spec.member)

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        if parent.has_told_to_exit:
            sys.exit(128 + signum)

    # These signals may reach the whole process group; the supervisor alone decides what they mean.
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # also for the programs that this process starts
    signal.signal(signal.SIGTERM, on_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # the parent has blocked them
    if forked is not None:
        ours, server = forked
        parent.fork_server = ForkServer(ours, server, read_inherited_state(), is_ready=True)
    parent.end_with_parent(spec.runtime_dir)
    _continue_when_parent_exits()
    try:
        module, _, function = spec.target.partition(":")
        getattr(importlib.import_module(module), function)(spec.payload, parent)
    except Exception as error:
        logger.debug("exits with an exception", exc_info=True)
        parent.report_failure(error)
        return 1
    return 0


def _fork_server(sock: socket.socket) -> tuple[socket.socket, ForkedProcess] | socket.socket | None:
    """Fork a server for children of this process. Return this end of its socket pair and its process, or None if the
    system refuses the fork.

    The function returns in every fork of that server, too, there with the fork's end of its own socket pair.
    """
    owner = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pid = os.fork()
    except OSError:  # the system has no room for another process; children are started fresh, or fail by themselves
        ours.close()
        theirs.close()
        return None
    if pid:
        theirs.close()
        return ours, ForkedProcess(pid)
    ours.close()
    sock.close()  # its closing is how the parent notices the exit of this process's owner
    _show_fork_server()
    _continue_when_parent_exits()
    return serve_forks(theirs, owner)


def _show_fork_server() -> None:
    show_command_line([*sys.orig_argv[:4], LABEL])


def _continue_when_parent_exits() -> None:
    """Have the kernel continue this process when its parent exits: a stopped process would not notice the exit."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
