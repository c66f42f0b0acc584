"""A worker behind a method: frames in, frames out. For executors that call their workers (ray-graph)."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import msgspec

from eagleray.config.environment import limit_openmp_spinning
from eagleray.messages.arrays import Frame
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended
from eagleray.messages.steps import AllocateCache, Call, Reply
from eagleray.messages.workers import WorkerSpec
from eagleray.process.gc_freeze import freeze_gc
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.worker.entry import end_cut_off


class FailedCall(Exception):
    """A call has failed on this rank. Raised, not returned: a graph hands out what hosts return only when all of them
    have, and the partners of a rank that has failed wait for it."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(reply)
        self.reply = reply
        """The encoded `Reply`, with its `Ended`."""


def open_frame_handler(payload: bytes) -> WorkerFrameHandler:
    """The worker that `payload`, an encoded `WorkerSpec`, describes."""
    return WorkerFrameHandler(msgspec.msgpack.decode(payload, type=WorkerSpec))


class WorkerFrameHandler:
    """Its calls may come from several threads, one at a time."""

    def __init__(self, spec: WorkerSpec) -> None:
        limit_openmp_spinning()
        from eagleray.worker.worker import Worker  # torch reads its environment when it is imported

        self._ends = ExitStack()
        self._ends.callback(HeartbeatSender.start(spec.heartbeat, on_silent=end_cut_off).close)
        self._worker = Worker(spec.worker, spec.rank, spec.config, spec.topology, device_index=spec.device_index)
        self._ends.callback(self._worker.close)
        self._calls: Codec[Call] = Codec(Call)
        self._replies: Codec[Reply] = Codec(Reply)
        self._lock = threading.Lock()

    def handle(self, frames: list[Frame]) -> list[Frame]:
        """The reply to a call; no frames if this rank has nothing to say. Raises `FailedCall`."""
        with self._lock:
            call = self._calls.decode(frames)
            reply = self._worker.handle(call)
            if isinstance(call.body, AllocateCache):  # the last call of a start
                freeze_gc()
            if reply is None:
                return []
            answer = self._replies.encode(reply)
            if isinstance(reply.body, Ended):
                raise FailedCall(bytes(answer[0]))
            return answer

    def close(self) -> None:
        self._ends.close()
