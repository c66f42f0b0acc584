"""Entry of every process that eagleray spawns: `spawn.Child` starts it with (file descriptor, label)."""

from __future__ import annotations

import ctypes
import importlib
import signal
import socket
import sys
from types import FrameType

import msgspec

from eagleray.log import get_logger, setup_process_logging
from eagleray.process.parent import Parent
from eagleray.process.spawn_protocol import GROUP_SIGNALS, TERMINAL_SIGNALS, SpawnSpec, read_frame

logger = get_logger(__name__)

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the target that the parent asks for and report an exception to the parent."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)  # a program that this process starts and that outlives it must not hide its exit
    frame = read_frame(sock)
    if frame is None:  # the parent exited while it spawned this process
        return 1
    spec = msgspec.msgpack.decode(frame, type=SpawnSpec)
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


def _continue_when_parent_exits() -> None:
    """Have the kernel continue this process when its parent exits: a stopped process would not notice the exit."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
