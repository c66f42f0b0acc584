"""The worker's process, from its birth to its end: attach to the queue, be heard, serve."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec

from eagleray.config.environment import limit_openmp_spinning
from eagleray.messages.workers import WorkerSpec
from eagleray.process.exit import exit_disconnected
from eagleray.process.parent import Parent
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.transport.message_queue_peer import MEDIA, REMOTE_MEDIA, MessageQueuePeer

ATTACH_SECONDS = 60.0


def run(payload: bytes, parent: Parent | None = None) -> None:
    """Be the worker that `payload`, an encoded `WorkerSpec`, describes. Returns when the engine closes the queue."""
    spec = msgspec.msgpack.decode(payload, type=WorkerSpec)
    limit_openmp_spinning()
    with ExitStack() as stack:
        media = MEDIA if spec.is_local else REMOTE_MEDIA
        listener = MessageQueuePeer.open(spec.queue, timeout=ATTACH_SECONDS, media=media)
        stack.callback(listener.close)
        # Only now: the engine knows already that this worker is there. And before the first heartbeat: while libraries
        # are loaded no thread runs, and a slow disk would be taken for a worker that hangs.
        from eagleray.worker.loop import serve
        from eagleray.worker.worker import Worker

        pulse = HeartbeatSender.start(spec.heartbeat, on_silent=exit_disconnected)
        stack.callback(pulse.close)
        worker = Worker(spec.worker, spec.rank, spec.config, spec.topology, device_index=spec.device_index)
        stack.callback(worker.close)
        serve(worker, listener)
