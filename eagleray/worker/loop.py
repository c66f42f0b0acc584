"""A worker's loop, in a process or Ray actor of its own: one queue in, one queue out."""

from __future__ import annotations

from eagleray.errors import ChannelClosed
from eagleray.messages.codec import Codec
from eagleray.messages.steps import AllocateCache, Call, Reply
from eagleray.process.gc_freeze import freeze_gc
from eagleray.transport.message_queue_peer import MessageQueuePeer
from eagleray.worker.worker import Worker

LOOK_SECONDS = 60.0
SEND_SECONDS = 60.0
"""The engine takes replies all the time; one that does not for so long will not come back."""


def serve(worker: Worker, listener: MessageQueuePeer) -> None:
    """Answer calls until the engine closes the queue."""
    calls: Codec[Call] = Codec(Call)
    replies: Codec[Reply] = Codec(Reply)
    try:
        while True:
            frames = listener.receive(LOOK_SECONDS)
            if frames is None:
                continue
            call = calls.decode(frames)
            reply = worker.handle(call)
            if reply is not None:
                listener.send(replies.encode(reply), SEND_SECONDS)
            if isinstance(call.body, AllocateCache):  # the last call of a start
                freeze_gc()
    except ChannelClosed:
        return
