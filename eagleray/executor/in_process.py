"""The worker groups without a process: one worker, an object of the engine's process."""

from __future__ import annotations

import queue
import threading
from collections import deque

from eagleray.config.resolve import first_device
from eagleray.config.sections import Config
from eagleray.errors import DeadlineExceeded
from eagleray.identity import EngineId, WorkerId
from eagleray.messages.steps import Call, Reply
from eagleray.messages.workers import Topology
from eagleray.worker.worker import Worker

SINGLE_WORKER = Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=["here"], addresses=["127.0.0.1"])

END_SECONDS = 10.0
"""How long the worker's thread may take to finish what it computes."""


def _worker(engine: EngineId, config: Config) -> Worker:
    first = first_device(config, engine.rank) or None  # None: the process's current one
    return Worker(WorkerId(engine), 0, config, SINGLE_WORKER, device_index=first)


class InProcessGroup:
    """`send` computes; `receive` hands out what was computed."""

    topology = SINGLE_WORKER

    def __init__(self, engine: EngineId, config: Config) -> None:
        self._worker = _worker(engine, config)
        self._replies: deque[Reply] = deque()

    def send(self, call: Call) -> None:
        reply = self._worker.handle(call)
        if reply is not None:
            self._replies.append(reply)

    def receive(self, timeout: float) -> Reply | None:
        return self._replies.popleft() if self._replies else None

    def check(self) -> None:
        """An object of this process cannot be lost."""

    def close(self) -> None:
        self._replies.clear()
        self._worker.close()


class ThreadGroup:
    """The worker computes in a thread of its own, so that the engine can plan the next step meanwhile."""

    topology = SINGLE_WORKER

    def __init__(self, engine: EngineId, config: Config) -> None:
        self._worker = _worker(engine, config)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    def send(self, call: Call) -> None:
        self._calls.put(call)

    def receive(self, timeout: float) -> Reply | None:
        try:
            return self._replies.get(timeout=timeout) if timeout > 0 else self._replies.get_nowait()
        except queue.Empty:
            return None

    def check(self) -> None:
        """A thread of this process cannot be lost: whatever it raises is a reply."""

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._calls.put(None)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the worker's thread still computes, {END_SECONDS:.0f} s after it was told to end")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            reply = self._worker.handle(call)
            if reply is not None:
                self._replies.put(reply)
        self._worker.close()
