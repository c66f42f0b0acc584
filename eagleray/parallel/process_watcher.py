"""Whether other processes of this host have ended: known by descriptors, which never mean another process that has got
the same number meanwhile."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import ExitStack


class ProcessWatcher:
    """Owns a descriptor of each of `pids` but our own. One that has ended before counts as ended."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = list(pids)
        self._ended: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._poll = select.poll()
        with ExitStack() as stack:
            for number, pid in enumerate(pids):
                if pid != os.getpid():
                    try:
                        descriptor = os.pidfd_open(pid)
                    except ProcessLookupError:
                        self._ended.add(number)
                        continue
                    stack.callback(os.close, descriptor)
                    self._numbers[descriptor] = number
                    self._poll.register(descriptor, select.POLLIN)
            self._stack = stack.pop_all()

    def ended(self) -> set[int]:
        """Which of them have ended, by their place in `pids`. Does not wait."""
        for descriptor, _ in self._poll.poll(0):
            self._ended.add(self._numbers[descriptor])
        return self._ended

    def close(self) -> None:
        """Harmless when repeated; nothing is known of processes that end later."""
        self._poll = select.poll()
        self._stack.close()
