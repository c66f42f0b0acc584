"""The worker group without a process: one worker, an object of the engine's process."""

from __future__ import annotations

from collections import deque

from eagleray.config import Config
from eagleray.identity import EngineId, WorkerId
from eagleray.messages.steps import Call, Reply
from eagleray.messages.workers import Topology
from eagleray.worker.worker import Worker

__all__ = ["InProcessGroup"]


class InProcessGroup:
    """`send` computes; `receive` hands out what was computed."""

    topology = Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=["here"], addresses=["127.0.0.1"])

    def __init__(self, engine: EngineId, config: Config) -> None:
        self._worker = Worker(WorkerId(engine), 0, config)
        self._replies: deque[Reply] = deque()

    def send(self, call: Call) -> None:
        self._replies.append(self._worker.handle(call))

    def receive(self, timeout: float) -> Reply | None:
        return self._replies.popleft() if self._replies else None

    def check(self) -> None:
        """An object of this process cannot be lost."""

    def close(self) -> None:
        self._replies.clear()
