"""Worker groups without worker processes: one worker, an object of the engine's process."""

from __future__ import annotations

import queue
import threading
from collections import deque

from eagleray.config.resolve import first_device
from eagleray.config.sections import Config
from eagleray.errors import DeadlineExceeded
from eagleray.executor.timeouts import THREAD_STOP_SECONDS
from eagleray.identity import EngineId, WorkerId
from eagleray.messages.steps import Call, Reply
from eagleray.messages.workers import Topology
from eagleray.worker.worker import Worker

SINGLE_WORKER = Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=["here"], addresses=["127.0.0.1"])


def _worker(engine: EngineId, config: Config) -> Worker:
    first = first_device(config, engine.rank) or None  # None means the current device of the process
    return Worker(WorkerId(engine), 0, config, SINGLE_WORKER, device_index=first)


class InProcessGroup:
    """Computes each call inside `send` and queues the reply for `receive`."""

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
        """Do nothing: an object of this process cannot be lost."""

    def close(self) -> None:
        self._replies.clear()
        self._worker.close()


class ThreadGroup:
    """Runs the worker in a thread, so that the engine can plan the next step meanwhile."""

    topology = SINGLE_WORKER

    def __init__(self, engine: EngineId, config: Config) -> None:
        self._worker = _worker(engine, config)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def send(self, call: Call) -> None:
        self._calls.put(call)

    def receive(self, timeout: float) -> Reply | None:
        try:
            return self._replies.get(timeout=timeout) if timeout > 0 else self._replies.get_nowait()
        except queue.Empty:
            return None

    def check(self) -> None:
        """Do nothing: a thread of this process cannot be lost, and exceptions of the worker are replies."""

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._calls.put(None)
        self._thread.join(THREAD_STOP_SECONDS)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                f"the worker's thread still runs {THREAD_STOP_SECONDS:.0f} s after it was asked to stop"
            )

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            reply = self._worker.handle(call)
            if reply is not None:
                self._replies.put(reply)
        self._worker.close()
