"""Worker group without worker processes: one worker, an object of the engine's process."""

from __future__ import annotations

from collections import deque

from eagleray.config.resolve import first_device
from eagleray.config.sections import Config
from eagleray.identity import EngineId, WorkerId
from eagleray.messages.steps import Call, Reply
from eagleray.messages.workers import Topology
from eagleray.worker.worker import Worker

SINGLE_WORKER = Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=["here"], addresses=["127.0.0.1"])


class InProcessGroup:
    """Begins each step inside `send` and finishes it inside `receive`, so that a GPU computes one step while the engine
    plans the next. On a CPU, and with every other call, all work is done inside `send`."""

    topology = SINGLE_WORKER

    def __init__(self, engine: EngineId, config: Config) -> None:
        first = first_device(config, engine.rank) or None  # None means the current device of the process
        self._worker = Worker(WorkerId(engine), 0, config, SINGLE_WORKER, device_index=first)
        self._replies: deque[Reply] = deque()

    def send(self, call: Call) -> None:
        self._replies += self._worker.handle(call)

    def receive(self, timeout: float) -> Reply | None:
        """Return the next reply. With a `timeout` of 0 no step is waited for; a longer one is left to the watchdog,
        since this thread cannot stop waiting for the device."""
        if not self._replies and self._worker.has_unfinished:
            self._replies += self._worker.finish_oldest() if timeout > 0 else self._worker.finish_done()
        return self._replies.popleft() if self._replies else None

    def check(self) -> None:
        """Do nothing: an object of this process cannot be lost."""

    def close(self) -> None:
        self._replies.clear()
        self._worker.close()
