"""The executor: numbers the calls, matches the replies, turns a worker's failure into an exception.

Final: what differs between backends is the `WorkerGroup` it is given. Used from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

from eagleray.errors import ChannelClosed, DeadlineExceeded, WorkerFailed, WorkerLost
from eagleray.executor.failure_monitor import PEER_EXIT_SECONDS
from eagleray.executor.group import WorkerGroup
from eagleray.executor.merge import merge_step, reporting_ranks
from eagleray.messages.steps import (
    Call,
    Reply,
    StepBroken,
    StepPlan,
    StepResult,
    WorkerCall,
    WorkerFailure,
    WorkerReply,
)
from eagleray.messages.workers import Topology

Body = TypeVar("Body", bound=WorkerReply)

STEP_SECONDS = 600.0
"""What a step may take where its sender does not say."""

ROOT_CAUSE_SECONDS = 0.3
"""When a worker dies, its partners fail too, and their news may be faster: how long to wait for the news of a death."""


class PendingStep:
    """A step that was sent. `result` waits for it; steps are waited for in the order in which they were sent."""

    def __init__(self, wait: Callable[[], StepResult]) -> None:
        self._wait = wait

    def result(self) -> StepResult:
        """Raises `WorkerFailed` if a worker raised, `WorkerLost` if one is gone, `DeadlineExceeded` if none answers,
        and `ExpertGroupBroken` if they are well, but another engine that steps together with this one is gone."""
        return self._wait()


@final
class Executor:
    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._last_call_id = 0
        self._replies: dict[int, dict[int, WorkerReply]] = {}  # call id -> rank -> reply, of calls not yet collected

    @property
    def topology(self) -> Topology:
        """Where the workers are."""
        return self._group.topology

    @property
    def world_size(self) -> int:
        return self._group.topology.world_size

    def step(self, plan: StepPlan, *, seconds: float = STEP_SECONDS) -> PendingStep:
        """Send `plan` to every worker; the result is the reply of the rank that samples, joined with those of other
        stages if they have something to say.

        `seconds`: for which the result is waited for; the wait begins when the steps before this one are done.
        """
        call_id = self._send(plan)
        return PendingStep(lambda: self._result(call_id, plan, seconds))

    def call(self, body: WorkerCall, reply: type[Body], *, timeout: float) -> list[Body]:
        """Send `body` to every worker and wait for all replies, in order of rank."""
        return list(self.gather(body, reply, timeout=timeout).values())

    def gather(
        self, body: WorkerCall, reply: type[Body], *, timeout: float, until: Callable[[Body], bool] | None = None
    ) -> dict[int, Body]:
        """As `call`, by rank; with `until`, a reply of which that is true ends the wait for the others."""
        call_id = self._send(body)
        settles = None if until is None else lambda body: until(_expect(reply, body))
        replies = self._collect(call_id, reply.__name__, range(self.world_size), timeout, settles)
        return {rank: _expect(reply, body) for rank, body in replies.items()}

    def check(self) -> None:
        """Raises `WorkerLost` or `WorkerFailed` if something has happened to a worker while nobody waited for it."""
        self._group.check()
        while (reply := self._group.receive(0)) is not None:
            self._take(reply)

    def forget_steps(self) -> None:
        """Nobody will ask for the results of the steps that were sent: drop what comes of them."""
        self._replies.clear()

    def close(self) -> None:
        """End the workers."""
        self._group.close()

    def _result(self, call_id: int, plan: StepPlan, seconds: float) -> StepResult:
        ranks = reporting_ranks(self._group.topology, plan)
        try:
            return merge_step(self._collect(call_id, StepResult.__name__, ranks, seconds, _is_broken))
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{plan.label} has not come back: {error}") from error

    def _send(self, body: WorkerCall) -> int:
        self._last_call_id += 1
        self._replies[self._last_call_id] = {}
        self._group.send(Call(self._last_call_id, body))
        return self._last_call_id

    def _collect(
        self,
        call_id: int,
        what: str,
        ranks: Sequence[int],
        seconds: float,
        until: Callable[[WorkerReply], bool] | None = None,
    ) -> dict[int, WorkerReply]:
        """The replies of `ranks` to the call, in order of rank, or those that there are when `until` is true of one.
        Replies to calls that nobody waits for are dropped."""
        replies = self._replies[call_id]
        deadline = time.monotonic() + seconds
        try:
            while len(replies) < len(ranks):
                if until is not None and any(until(body) for body in replies.values()):
                    break
                reply = self._group.receive(max(0.0, deadline - time.monotonic()))
                if reply is not None:
                    self._take(reply)
                elif time.monotonic() >= deadline:
                    raise DeadlineExceeded(self._explain(call_id, what, ranks, seconds))
        finally:
            del self._replies[call_id]
        return {rank: replies[rank] for rank in sorted(replies)}

    def _take(self, reply: Reply) -> None:
        if isinstance(reply.body, WorkerFailure):
            self._fail(reply.body)
        if reply.call_id in self._replies:
            self._replies[reply.call_id][reply.rank] = reply.body

    def _fail(self, failure: WorkerFailure) -> None:
        """Raise the root cause: the death of another worker, if that is what made this one fail."""
        cause = failure.cause
        if cause.is_user_error:
            raise cause.as_user_error()
        is_partner_gone = cause.kind == ChannelClosed.__name__
        try:
            deadline = time.monotonic() + (PEER_EXIT_SECONDS if is_partner_gone else ROOT_CAUSE_SECONDS)
            while (left := deadline - time.monotonic()) > 0:
                self._group.receive(left)
        except WorkerLost as lost:
            raise WorkerLost(f"{lost} ({failure.worker.label} noticed it: {cause})") from None
        kind = WorkerLost if is_partner_gone else WorkerFailed
        raise kind(f"{failure.worker.label}: {cause}\n{cause.traceback}".rstrip())

    def _explain(self, call_id: int, what: str, ranks: Sequence[int], seconds: float) -> str:
        answered = self._replies[call_id]
        silent = [rank for rank in ranks if rank not in answered]
        return f"no {what} from rank {', '.join(map(str, silent))} within {seconds:.0f} s (call {call_id})"


def _is_broken(reply: WorkerReply) -> bool:
    return isinstance(reply, StepBroken)


def _expect(kind: type[Body], body: Any) -> Body:
    assert isinstance(body, kind), f"a worker answered with {type(body).__name__}, not {kind.__name__}"
    return body
