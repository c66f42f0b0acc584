"""Worker group whose calls and replies go over a message queue. `processes` and `ray_actors` start the workers."""

from __future__ import annotations

from contextlib import ExitStack

from eagleray.errors import ChannelClosed, WorkerLost
from eagleray.executor.failure_monitor import FailureMonitor
from eagleray.executor.timeouts import PEER_EXIT_SECONDS, SEND_TIMEOUT_SECONDS
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended
from eagleray.messages.steps import Call, Reply
from eagleray.messages.workers import Topology
from eagleray.transport.message_queue_hub import MessageQueueHub


class QueueGroup:
    """See `group.WorkerGroup`. Closing `exit_stack` stops the workers and closes everything else of the group."""

    def __init__(
        self, *, topology: Topology, hub: MessageQueueHub, failures: FailureMonitor, exit_stack: ExitStack
    ) -> None:
        self.topology = topology
        self._hub = hub
        self._failures = failures
        self._exit_stack = exit_stack
        self._calls: Codec[Call] = Codec(Call)
        self._replies: Codec[Reply] = Codec(Reply)

    def send(self, call: Call) -> None:
        self._failures.check()
        try:
            self._hub.send(self._calls.encode(call), SEND_TIMEOUT_SECONDS, self._failures.check)
        except ChannelClosed as error:
            raise self._cause(error) from error

    def receive(self, timeout: float) -> Reply | None:
        try:
            received = self._hub.receive(timeout)
        except ChannelClosed as error:
            raise self._cause(error) from error
        if received is not None:
            reply = self._replies.decode(received[1])
            if isinstance(reply.body, Ended):
                self._failures.mark_failed()
            return reply
        self._failures.check()
        return None

    def check(self) -> None:
        self._failures.check()

    def close(self) -> None:
        self._failures.expect_exits()
        self._exit_stack.close()

    def _cause(self, error: ChannelClosed) -> Exception:
        """Return why a worker closed its end of the queue; the monitors report it in a moment."""
        self._failures.wait(PEER_EXIT_SECONDS)
        self._failures.check()
        return WorkerLost(f"a worker has left the queue: {error}")
