"""The executor: numbers the calls, matches the replies, turns a worker's failure into an exception.

Final: what differs between backends is the `WorkerGroup` it is given. Used from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, final

from eagleray import errors
from eagleray.errors import DeadlineExceeded, UserError, WorkerFailed
from eagleray.executor.group import WorkerGroup
from eagleray.messages.steps import Call, StepPlan, StepResult, WorkerCall, WorkerFailure, WorkerReply

__all__ = ["Executor", "PendingStep"]

Body = TypeVar("Body", bound=WorkerReply)

STEP_SECONDS = 600.0
"""A step that takes longer than this will not come back."""


class PendingStep:
    """A step that was sent. `result` waits for it."""

    def __init__(self, wait: Callable[[], StepResult]) -> None:
        self._wait = wait

    def result(self) -> StepResult:
        """Raises `WorkerFailed` if a worker raised, `DeadlineExceeded` if none answered."""
        return self._wait()


@final
class Executor:
    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._last_call_id = 0
        self._replies: dict[int, dict[int, WorkerReply]] = {}  # call id -> rank -> reply, of calls not yet collected

    def step(self, plan: StepPlan) -> PendingStep:
        """Send `plan` to every worker; the result is the reply of the rank that samples."""
        call_id = self._send(plan)
        deadline = time.monotonic() + STEP_SECONDS
        return PendingStep(lambda: self._collect(call_id, StepResult, 1, deadline)[0])

    def call(self, body: WorkerCall, reply: type[Body], *, timeout: float) -> list[Body]:
        """Send `body` to every worker and wait for all replies, in order of rank."""
        call_id = self._send(body)
        return self._collect(call_id, reply, self._group.topology.world_size, time.monotonic() + timeout)

    def close(self) -> None:
        """End the workers."""
        self._group.close()

    def _send(self, body: WorkerCall) -> int:
        self._last_call_id += 1
        self._replies[self._last_call_id] = {}
        self._group.send(Call(self._last_call_id, body))
        return self._last_call_id

    def _collect(self, call_id: int, kind: type[Body], count: int, deadline: float) -> list[Body]:
        """The first `count` replies to the call, by rank. Replies to calls that nobody waits for are dropped."""
        replies = self._replies[call_id]
        try:
            while len(replies) < count:
                self._pump(call_id, max(0.0, deadline - time.monotonic()))
        finally:
            del self._replies[call_id]
        return [_expect(kind, replies[rank]) for rank in sorted(replies)]

    def _pump(self, call_id: int, timeout: float) -> None:
        reply = self._group.receive(timeout)
        if reply is None:
            raise DeadlineExceeded(f"no worker answered call {call_id} before its deadline")
        if isinstance(reply.body, WorkerFailure):
            _raise(reply.body)
        if reply.call_id in self._replies:
            self._replies[reply.call_id][reply.rank] = reply.body


def _expect(kind: type[Body], body: Any) -> Body:
    assert isinstance(body, kind), f"a worker answered with {type(body).__name__}, not {kind.__name__}"
    return body


def _raise(failure: WorkerFailure) -> None:
    cause = failure.cause
    if cause.is_user_error:
        error = getattr(errors, cause.kind, UserError)
        raise error(cause.message)
    raise WorkerFailed(f"{failure.worker.label}: {cause}\n{cause.traceback}")
