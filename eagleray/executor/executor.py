"""The executor: numbers the calls, matches the replies, turns a worker's failure into an exception.

The class is final: backends differ only in their `WorkerGroup`. Used from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

import msgspec
import numpy as np

from eagleray.errors import ChannelClosed, DeadlineExceeded, ExpertGroupBroken, WorkerFailed, WorkerLost
from eagleray.executor.group import WorkerGroup
from eagleray.executor.timeouts import PEER_EXIT_SECONDS, ROOT_CAUSE_SECONDS, STEP_TIMEOUT_SECONDS
from eagleray.messages.arrays import Array
from eagleray.messages.failure import Ended
from eagleray.messages.steps import (
    Call,
    Reply,
    StageRoutedExperts,
    StepBroken,
    StepPlan,
    StepResult,
    WorkerCall,
    WorkerReply,
)

Body = TypeVar("Body", bound=WorkerReply)


class PendingCall(Generic[Body]):
    """A call that was sent without waiting for its replies. Made by `Executor.begin`."""

    def __init__(self, poll: Callable[[], dict[int, Body] | None], drop: Callable[[], None]) -> None:
        self._poll = poll
        self._drop = drop

    def poll(self) -> dict[int, Body] | None:
        """Return the replies of all workers, by rank, once; None if some have not arrived. Raises `WorkerFailed` or
        `WorkerLost`."""
        return self._poll()

    def drop(self) -> None:
        """Ignore the replies."""
        self._drop()


class PendingStep:
    """A step that was sent. Results must be requested in the order in which the steps were sent."""

    def __init__(self, wait: Callable[[], StepResult]) -> None:
        self._wait = wait

    def result(self) -> StepResult:
        """Wait for the result of the step.

        Raises `WorkerFailed` if a worker raised, `WorkerLost` if one exited, `DeadlineExceeded` if one does not reply,
        and `ExpertGroupBroken` if the workers are intact but another engine of the expert group exited.
        """
        return self._wait()


@final
class Executor:
    """Calls the workers of one engine."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.topology = group.topology
        """Ranks, nodes and parallel sizes of the workers."""
        self.world_size = self.topology.world_size
        self._sampler = [self.topology.sampler_rank]
        self._first_of_stages = list(range(0, self.world_size, self.topology.tensor_parallel_size))
        self._last_call_id = 0
        self._replies: dict[int, dict[int, WorkerReply]] = {}  # call id -> rank -> reply, of calls not yet collected
        self._polled: set[int] = set()  # ids of calls whose replies are polled

    def step(self, plan: StepPlan, *, seconds: float = STEP_TIMEOUT_SECONDS) -> PendingStep:
        """Send `plan` to every worker. The result is the reply of the rank that samples, merged with the replies of
        other stages that report something.

        `seconds` limits the wait for the result, which begins when the steps before this one are done.
        """
        call_id = self._send(plan)
        return PendingStep(lambda: self._result(call_id, plan, seconds))

    def call(self, body: WorkerCall, reply: type[Body], *, timeout: float) -> list[Body]:
        """Send `body` to every worker and wait for all replies, in order of rank."""
        return list(self.gather(body, reply, timeout=timeout).values())

    def gather(
        self, body: WorkerCall, reply: type[Body], *, timeout: float, until: Callable[[Body], bool] | None = None
    ) -> dict[int, Body]:
        """Like `call`, by rank. The wait ends early at the first reply for which `until` returns True."""
        call_id = self._send(body)
        stops = None if until is None else lambda body: until(_expect(reply, body))
        replies = self._collect(call_id, reply.__name__, range(self.world_size), timeout, stops)
        return {rank: _expect(reply, body) for rank, body in replies.items()}

    def begin(self, body: WorkerCall, reply: type[Body]) -> PendingCall[Body]:
        """Send `body` to every worker. Steps may be sent and awaited before its replies are polled."""
        call_id = self._send(body)
        self._polled.add(call_id)

        def poll() -> dict[int, Body] | None:
            self.check()
            replies = self._replies[call_id]
            if len(replies) < self.world_size:
                return None
            drop()
            return {rank: _expect(reply, replies[rank]) for rank in sorted(replies)}

        def drop() -> None:
            self._replies.pop(call_id, None)
            self._polled.discard(call_id)

        return PendingCall(poll, drop)

    def check(self) -> None:
        """Raise `WorkerLost` or `WorkerFailed` if a worker exited or failed since the last call."""
        self._group.check()
        while (reply := self._group.receive(0)) is not None:
            self._store(reply)

    def drop_steps(self) -> None:
        """Drop the results of the steps in flight, present and future, because no one will request them."""
        self._replies = {call_id: replies for call_id, replies in self._replies.items() if call_id in self._polled}

    def close(self) -> None:
        """Stop the workers."""
        self._group.close()

    def _result(self, call_id: int, plan: StepPlan, seconds: float) -> StepResult:
        # Each stage knows the routed experts of its own layers, so if a row wants them the first rank of every stage
        # replies; otherwise the rank that samples replies alone.
        ranks = self._first_of_stages if plan.capture_rows else self._sampler
        try:
            return _merge(self._collect(call_id, StepResult.__name__, ranks, seconds, _is_broken))
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{plan.label} has not returned: {error}") from error

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
        """Wait for the replies of `ranks` to the call and return them in order of rank; those present, if `until` holds
        for one of them. Replies to other calls that are not awaited are dropped."""
        replies = self._replies[call_id]
        deadline = time.monotonic() + seconds
        try:
            while len(replies) < len(ranks):
                if until is not None and replies and any(until(body) for body in replies.values()):
                    break
                reply = self._group.receive(max(0.0, deadline - time.monotonic()))
                if reply is not None:
                    self._store(reply)
                elif time.monotonic() >= deadline:
                    raise DeadlineExceeded(self._explain(call_id, what, ranks, seconds))
        finally:
            del self._replies[call_id]
        return {rank: replies[rank] for rank in sorted(replies)}

    def _store(self, reply: Reply) -> None:
        if isinstance(reply.body, Ended):
            self._fail(reply.body)
        if reply.call_id in self._replies:
            self._replies[reply.call_id][reply.rank] = reply.body

    def _fail(self, failure: Ended) -> None:
        """Raise the root cause: the exit of another worker, if that made this one fail."""
        cause = failure.cause
        if cause.is_user_error:
            raise cause.as_user_error()
        is_peer_gone = cause.kind == ChannelClosed.__name__
        try:
            deadline = time.monotonic() + (PEER_EXIT_SECONDS if is_peer_gone else ROOT_CAUSE_SECONDS)
            while (remaining := deadline - time.monotonic()) > 0:
                self._group.receive(remaining)
        except WorkerLost as lost:
            raise WorkerLost(f"{lost} ({failure.member.label} noticed it: {cause})") from None
        kind = WorkerLost if is_peer_gone else WorkerFailed
        raise kind(f"{failure.member.label}: {cause}\n{cause.traceback}".rstrip())

    def _explain(self, call_id: int, what: str, ranks: Sequence[int], seconds: float) -> str:
        replied = self._replies[call_id]
        silent = [rank for rank in ranks if rank not in replied]
        return f"no {what} from rank {', '.join(map(str, silent))} within {seconds:.0f} s (call {call_id})"


def _is_broken(reply: WorkerReply) -> bool:
    return isinstance(reply, StepBroken)


def _merge(replies: Mapping[int, WorkerReply]) -> StepResult:
    """Merge the replies of the reporting ranks, in order of rank, so that the rank that samples is last.

    Raises `ExpertGroupBroken` if one is `StepBroken`.
    """
    for reply in replies.values():
        if isinstance(reply, StepBroken):
            raise ExpertGroupBroken(f"step {reply.step}: {reply.cause}")
    *others, sampled = replies.values()
    assert isinstance(sampled, StepResult), f"the rank that samples replied with {type(sampled).__name__}"
    if not others:
        return sampled
    layers = [_routed_experts(reply) for reply in replies.values()]
    return msgspec.structs.replace(sampled, routed_experts=np.concatenate(layers, axis=1))


def _routed_experts(reply: WorkerReply) -> Array:
    assert isinstance(reply, StepResult | StageRoutedExperts) and reply.routed_experts is not None
    return reply.routed_experts


def _expect(kind: type[Body], body: Any) -> Body:
    assert isinstance(body, kind), f"a worker replied with {type(body).__name__}, not {kind.__name__}"
    return body
