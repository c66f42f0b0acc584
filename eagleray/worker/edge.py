"""A worker behind a method: frames in, frames out. For executors that call their workers (ray-graph)."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

import msgspec

from eagleray.config.environment import let_waiting_threads_sleep
from eagleray.log import get_logger
from eagleray.messages.arrays import Frame
from eagleray.messages.codec import Codec
from eagleray.messages.steps import Call, Reply
from eagleray.messages.workers import WorkerSpec
from eagleray.transport import Pulse

__all__ = ["WorkerEdge", "open_edge"]

logger = get_logger(__name__)


def open_edge(payload: bytes) -> WorkerEdge:
    """The worker that `payload`, an encoded `WorkerSpec`, describes."""
    return WorkerEdge(msgspec.msgpack.decode(payload, type=WorkerSpec))


class WorkerEdge:
    """Its calls may come from several threads, one at a time."""

    def __init__(self, spec: WorkerSpec) -> None:
        let_waiting_threads_sleep()
        from eagleray.worker.worker import Worker  # torch reads its environment when it is imported

        self._ends = ExitStack()
        self._ends.callback(Pulse.start(spec.pulse, on_silent=_end).close)
        self._worker = Worker(spec.worker, spec.rank, spec.config, spec.topology, device_index=spec.device_index)
        self._ends.callback(self._worker.close)
        self._calls: Codec[Call] = Codec(Call)
        self._replies: Codec[Reply] = Codec(Reply)
        self._lock = threading.Lock()

    def handle(self, frames: list[Frame]) -> list[Frame]:
        """The reply to a call; no frames if this rank has nothing to say."""
        with self._lock:
            reply = self._worker.handle(self._calls.decode(frames))
            return [] if reply is None else self._replies.encode(reply)

    def close(self) -> None:
        self._ends.close()


def _end(seconds: float) -> None:
    logger.error("the engine was silent for %.0f s: ending", seconds)
    os._exit(1)
