"""Doorbells: how a process sleeps until another one wakes it, without burning a core.

Each process has one doorbell: a pipe that it polls, and flags in shared memory that say that it sleeps, and for what. A
process that has changed something that another may wait for rings: it reads the flag, and writes to the pipe only if
the flag is set.

Both sides store a word and then load another: the sleeper sets its flag and checks once more for what it waits for, the
ringer has published and reads the flag. Even on x86-64 a load may overtake an earlier store to another word, and each
could miss the other; so each puts a full fence in between. Taking and releasing a lock that no other thread uses is
one: it is done by instructions with the `lock` prefix, which wait for all earlier stores. Should a ring get lost all
the same (its process was killed in the middle of it), the sleeper checks again after half a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import zmq

from eagleray.errors import ChannelClosed
from eagleray.transport.timeouts import DOORBELL_SLEEP_SECONDS, DOORBELL_SPIN_SECONDS

sched_yield = getattr(os, "sched_yield", lambda: None)


def ring(pipe: int) -> None:
    """Wake the process that polls the pipe. A full pipe wakes it too, and one without readers has no process to
    wake."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(pipe, b"\0")


class Bell:
    """Wakes one sleeper if its flag says that it sleeps. `flag` is a view of one word."""

    def __init__(self, pipe: int, flag: memoryview) -> None:
        self._pipe = pipe
        self._flag = flag
        self._fence = threading.Lock()

    def ring(self) -> None:
        """Wake the sleeper, after the change was published."""
        with self._fence:
            pass
        if self._flag[0]:
            self._flag[0] = 0
            ring(self._pipe)


class Doorbell:
    """The sleeping end. Used from one thread; `wake` and `stop` may be called from any.

    Owns the descriptors that it is given: the two ends of a pipe, or twice the same one, open for both.
    """

    def __init__(self, read_end: int, write_end: int) -> None:
        self.read_end = read_end
        self.write_end = write_end
        self.stopped = False
        self._woken = False
        self._open = True
        self._lock = threading.Lock()
        self._fence = threading.Lock()
        self._poller: Any = None
        self.watch(())

    @classmethod
    def make(cls) -> Doorbell:
        """Make a doorbell over a new pipe."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        return cls(read_end, write_end)

    def watch(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        """Let messages at these sockets, in place of earlier ones, end a wait too."""
        self._poller = zmq.Poller() if sockets else select.poll()
        self._poller.register(self.read_end, select.POLLIN)
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)

    def wait(self, ready: Callable[[], bool], deadline: float, flags: Sequence[memoryview]) -> None:
        """Wait until `ready()`, a ring or the deadline, at most half a second; the caller then checks again.

        `flags` belong to the bells that ring for the awaited change. Raises `ChannelClosed` once stopped.
        """
        spin_until = min(deadline, monotonic() + DOORBELL_SPIN_SECONDS)
        while monotonic() < spin_until:
            if ready():
                return
            sched_yield()
        for flag in flags:
            flag[0] = 1
        with self._fence:
            pass
        if not ready() and (left := min(deadline - monotonic(), DOORBELL_SLEEP_SECONDS)) > 0:
            self._poller.poll(math.ceil(left * 1000))
            with contextlib.suppress(BlockingIOError):
                os.read(self.read_end, 4096)
        for flag in flags:
            flag[0] = 0
        self.check()

    def check(self) -> None:
        """Raise `ChannelClosed` once stopped."""
        if self.stopped:
            raise ChannelClosed("the queue was closed")

    def pop_wake(self) -> bool:
        """Whether `wake` was called since the last call of this method."""
        if self._woken:  # cleared only if it was seen: `wake` may come in between
            self._woken = False
            return True
        return False

    def wake(self) -> None:
        """End the current wait, or the next one. May be called from any thread, also after `close`."""
        self._woken = True
        with self._lock:
            if self._open:
                ring(self.write_end)

    def stop(self) -> None:
        """Have the current wait and all later ones raise `ChannelClosed`. May be called from any thread."""
        self.stopped = True
        self.wake()

    def close(self) -> None:
        """Close the pipe. No thread may wait afterwards."""
        with self._lock:
            if self._open:
                self._open = False
                for descriptor in {self.read_end, self.write_end}:
                    os.close(descriptor)
