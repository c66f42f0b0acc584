"""Detects that other processes of this host have exited. It holds a descriptor of each, because a process id may mean
another process by then."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import ExitStack


class ProcessWatcher:
    """Owns a descriptor of each of `pids` but our own. A process that exited before is reported as exited."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = list(pids)
        self._exited: set[int] = set()
        self._indices: dict[int, int] = {}
        self._poll = select.poll()
        with ExitStack() as stack:
            for index, pid in enumerate(pids):
                if pid != os.getpid():
                    try:
                        descriptor = os.pidfd_open(pid)
                    except ProcessLookupError:
                        self._exited.add(index)
                        continue
                    stack.callback(os.close, descriptor)
                    self._indices[descriptor] = index
                    self._poll.register(descriptor, select.POLLIN)
            self._exit_stack = stack.pop_all()

    def exited(self) -> set[int]:
        """Return the indices in `pids` of the processes that have exited, without waiting."""
        for descriptor, _ in self._poll.poll(0):
            self._exited.add(self._indices[descriptor])
        return self._exited

    def close(self) -> None:
        """Stop watching: later exits are not reported. Idempotent."""
        self._poll = select.poll()
        self._exit_stack.close()
