"""A worker behind a method that takes frames and returns frames, because a compiled graph calls methods."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import msgspec

from eagleray.config.environment import limit_openmp_spinning
from eagleray.errors import FailedCall
from eagleray.messages.arrays import Frame
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended
from eagleray.messages.steps import AllocateCache, Call, Reply
from eagleray.messages.workers import WorkerSpec
from eagleray.process.exit import exit_disconnected
from eagleray.process.gc_freeze import freeze_gc
from eagleray.transport.heartbeat import HeartbeatSender


def open_frame_handler(payload: bytes) -> WorkerFrameHandler:
    """Create the worker that `payload`, an encoded `WorkerSpec`, describes."""
    return WorkerFrameHandler(msgspec.msgpack.decode(payload, type=WorkerSpec))


class WorkerFrameHandler:
    """Calls may come from several threads; they are handled one at a time."""

    def __init__(self, spec: WorkerSpec) -> None:
        limit_openmp_spinning()
        from eagleray.worker.worker import Worker  # torch reads its environment when it is imported

        self._exit_stack = ExitStack()
        self._exit_stack.callback(HeartbeatSender.start(spec.heartbeat, on_silent=exit_disconnected).close)
        self._worker = Worker(spec.worker, spec.rank, spec.config, spec.topology, device_index=spec.device_index)
        self._exit_stack.callback(self._worker.close)
        self._calls: Codec[Call] = Codec(Call)
        self._replies: Codec[Reply] = Codec(Reply)
        self._lock = threading.Lock()

    def handle(self, frames: list[Frame]) -> list[Frame]:
        """Return the reply to a call; no frames if this rank does not reply. Raises `FailedCall`."""
        with self._lock:
            call = self._calls.decode(frames)
            replies = self._worker.handle(call)
            while self._worker.has_unfinished:  # the graph has one result for each call
                replies += self._worker.finish_oldest()
            if isinstance(call.body, AllocateCache):  # the last call of a start
                freeze_gc()
            if not replies:
                return []
            [reply] = replies
            encoded = self._replies.encode(reply)
            if isinstance(reply.body, Ended):
                raise FailedCall(bytes(encoded[0]))
            return encoded

    def close(self) -> None:
        self._exit_stack.close()
