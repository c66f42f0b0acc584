"""The worker group whose calls and replies go over a queue. Who brings the workers to life, and ends them, is another's
concern: `processes` and `ray_actors` each make one of these."""

from __future__ import annotations

from contextlib import ExitStack

from eagleray.errors import ChannelClosed, WorkerLost
from eagleray.executor.failure_monitor import PEER_EXIT_SECONDS, FailureMonitor
from eagleray.messages.codec import Codec
from eagleray.messages.steps import Call, Reply, WorkerFailure
from eagleray.messages.workers import Topology
from eagleray.transport.message_queue_hub import MessageQueueHub

SEND_SECONDS = 60.0
"""A worker that takes no call for so long, though it is alive, will not come back."""


class QueueGroup:
    """See `group.WorkerGroup`. `ends` ends the workers, and whatever else belongs to the group, when it is closed."""

    def __init__(
        self, *, topology: Topology, broadcaster: MessageQueueHub, losses: FailureMonitor, ends: ExitStack
    ) -> None:
        self.topology = topology
        self._broadcaster = broadcaster
        self._losses = losses
        self._ends = ends
        self._calls: Codec[Call] = Codec(Call)
        self._replies: Codec[Reply] = Codec(Reply)

    def send(self, call: Call) -> None:
        self._losses.check()
        try:
            self._broadcaster.send(self._calls.encode(call), SEND_SECONDS, self._losses.check)
        except ChannelClosed as error:
            raise self._cause(error) from error

    def receive(self, timeout: float) -> Reply | None:
        try:
            received = self._broadcaster.receive(timeout)
        except ChannelClosed as error:
            raise self._cause(error) from error
        if received is not None:
            reply = self._replies.decode(received[1])
            if isinstance(reply.body, WorkerFailure):
                self._losses.mark_failed()
            return reply
        self._losses.check()
        return None

    def check(self) -> None:
        self._losses.check()

    def close(self) -> None:
        self._losses.expect()
        self._ends.close()

    def _cause(self, error: ChannelClosed) -> Exception:
        """Why a worker's end of the queue is closed: those who watch the workers know in a moment."""
        self._losses.wait(PEER_EXIT_SECONDS)
        self._losses.check()
        return WorkerLost(f"a worker has left the queue: {error}")
