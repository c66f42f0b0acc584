"""Entry point of a worker process or Ray actor: attach to the queue, start the heartbeat, serve."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec

from eagleray.config.environment import limit_openmp_spinning
from eagleray.messages.workers import WorkerSpec
from eagleray.process.exit import exit_broken_device, exit_disconnected
from eagleray.process.parent import Parent
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.transport.message_queue_peer import MEDIA, REMOTE_MEDIA, MessageQueuePeer
from eagleray.worker.timeouts import ATTACH_TIMEOUT_SECONDS


def run(payload: bytes, parent: Parent | None = None) -> None:
    """Run the worker that `payload`, an encoded `WorkerSpec`, describes. Returns when the engine closes the queue."""
    spec = msgspec.msgpack.decode(payload, type=WorkerSpec)
    limit_openmp_spinning()
    with ExitStack() as stack:
        media = MEDIA if spec.is_local else REMOTE_MEDIA
        queue = MessageQueuePeer.open(spec.queue, timeout=ATTACH_TIMEOUT_SECONDS, media=media)
        stack.callback(queue.close)
        # torch is imported after the worker has attached, so that the engine knows early that it runs, and before the
        # first heartbeat: no thread runs during an import, so a slow disk would look like a worker that hangs.
        from eagleray.worker.worker import Worker, serve

        heartbeat = HeartbeatSender.start(spec.heartbeat, on_silent=exit_disconnected)
        stack.callback(heartbeat.close)
        worker = Worker(spec.worker, spec.rank, spec.config, spec.topology, device_index=spec.device_index)
        stack.callback(worker.close)
        serve(worker, queue)
        if worker.has_broken_device:
            exit_broken_device()
