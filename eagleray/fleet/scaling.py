"""Scaling of the fleet: the queue of operations, their callers, and what is known of those that have ended.

Pure. One operation is executed at a time (`scaling_operations`). It goes on without its caller, and a caller that asks
again with the same id finds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from eagleray.errors import DeadlineExceeded, EagleRayError, InvalidRequest, NotFound, WrongState
from eagleray.fleet import timeouts
from eagleray.fleet.checkpoint_fetch import CheckpointFetch, needs_fetch
from eagleray.fleet.control.caller import Caller
from eagleray.fleet.process_exit import as_exception
from eagleray.fleet.scaling_operations import FleetChanges, Remove, RolledBack, ScalingOperation, Step, Steps, Until
from eagleray.fleet.turn import ScalingTimer, Turn
from eagleray.identity import ClientId, MemberId, replica_key
from eagleray.log import get_logger
from eagleray.messages.checkpoints import CheckpointFetched
from eagleray.messages.control import ControlCall, ControlReturned
from eagleray.messages.failure import Failure
from eagleray.messages.plain import pack
from eagleray.messages.scaling import GetScaling, RestartEngines, Scale

logger = get_logger(__name__)

MAX_PAST = 100
"""Number of operations that have ended and whose outcome can be asked for."""


class Restarts(Protocol):
    """The operations that restart engines. `RollingRestart` is one."""

    @property
    def changes(self) -> dict[str, Any]:
        """Options of all engines that differ from those of the start."""

    def steps_of(self, operation: ScalingOperation, request: RestartEngines) -> Steps:
        """Return the generator of an operation."""

    def undo(self, operation: ScalingOperation, error: EagleRayError) -> Steps:
        """Return the generator that undoes a failed operation, and raises `RolledBack` at its end."""


class Scaling:
    """`forbidden` returns the reason why an operation may not begin now; None if it may."""

    def __init__(
        self,
        changes: FleetChanges,
        restarts: Restarts,
        turn: Turn,
        *,
        instance: str,
        forbidden: Callable[[Scale | RestartEngines], EagleRayError | None],
    ) -> None:
        self._changes = changes
        self._restarts = restarts
        self._turn = turn
        self._instance = instance
        self._forbidden = forbidden
        self._current: ScalingOperation | None = None
        self._queue: list[ScalingOperation] = []
        self._fetch = CheckpointFetch(changes.membership, turn)
        self._past: dict[str, ScalingOperation] = {}
        """Operations that have ended, by id, the newest last."""
        self.autoscale: Callable[[], dict[str, Any]] | None = None
        """Describes the autoscaler; None if the number of engines does not follow the load."""

    @property
    def is_idle(self) -> bool:
        """Whether no operation runs or is about to; the checkpoint of one may be fetched."""
        return self._current is None and not self._queue

    def begin(self, operation_id: str, request: Scale) -> ScalingOperation:
        """Begin an operation of the autoscaler, which has no caller. Raises the reason why it may not begin."""
        operation = self._enqueue(operation_id, request, None)
        operation.is_automatic = True
        return operation

    # Events.

    def call(self, call: ControlCall, request: Scale | RestartEngines | GetScaling) -> None:
        """Begin an operation, or let the call join the one with its id."""
        caller = Caller(
            call.client, call.call_id, self._turn.now + min(call.timeout, timeouts.CALL_TIMEOUT_LIMIT_SECONDS)
        )
        try:
            if isinstance(request, GetScaling):
                self._answer(caller, self._describe(self._find(request.operation_id)))
                return
            operation = self._known(call.operation_id, request)
            if operation is None:
                self._check_manual(request)
                begin = self._begin_fetch if needs_fetch(request) else self._enqueue
                operation = begin(call.operation_id, request, call.client)
        except EagleRayError as error:
            self._answer(caller, error)
            return
        if operation.has_ended:
            self._answer(caller, operation.error or self._describe(operation))
        else:
            operation.callers.append(caller)
            self._set_timer()

    def on_fetched(self, message: CheckpointFetched) -> None:
        """Handle that a client has the checkpoint of an operation, or cannot get it."""
        if (operation := self._fetch.take(message)) is None:
            return
        assert isinstance(operation.request, RestartEngines)
        operation.fetched, error = message.options, None
        if message.failure is not None:
            error = as_exception(message.client.label, message.failure)
        else:
            error = self._forbidden(msgspec.structs.replace(operation.request, options=message.options))
        if error is not None:
            self._finish(operation, error)
        else:
            operation.phase = "queued"
            self._queue.append(operation)

    def on_clients_changed(self) -> None:
        """Handle that a client was attached, or has left."""
        self._fetch.on_clients_changed()

    def pass_time(self) -> None:
        """Answer the callers whose deadlines have passed. Their operations go on."""
        now = self._turn.now
        if (fetching := self._fetch.operation) is not None and self._fetch.is_late:
            too_late = DeadlineExceeded(f"the checkpoint was not there in time: {self._fetch.reason}")
            self._fetch.end()
            self._finish(fetching, too_late)
        for operation in self._operations:
            for caller in [caller for caller in operation.callers if now >= caller.deadline]:
                operation.callers.remove(caller)
                late = f"operation {operation.operation_id} goes on: {self._progress(operation)}; ask for its status"
                self._answer(caller, DeadlineExceeded(late))

    def fail(self, error: EagleRayError) -> None:
        """End every operation, because the instance ends."""
        for operation in self._operations:
            self._finish(operation, error)
        self._fetch.end()
        self._queue.clear()
        self._current = None

    def next_step(self) -> Step | None:
        """Return the next step to carry out; None while there is nothing to do but wait."""
        while True:
            operation = self._current
            if operation is None:
                if not self._queue:
                    self._set_timer()
                    return None
                self._begin(operation := self._queue.pop(0))
            assert operation.steps is not None
            try:
                if operation.until is not None and not operation.until.holds():
                    self._set_timer()
                    return None
                operation.until = None
                step = next(operation.steps)
            except StopIteration:
                self._end(operation, None)
            except RolledBack as rolled_back:
                self._end(operation, rolled_back.error)
            except EagleRayError as error:
                self._roll_back(operation, error)
            else:
                if isinstance(step, Remove):
                    self._answer_callers_at(operation, step.key)
                if not isinstance(step, Until):
                    return step
                operation.until = step

    # The queue.

    @property
    def _operations(self) -> list[ScalingOperation]:
        """The operation that runs, those that wait, and the one whose checkpoint is fetched."""
        fetching = self._fetch.operation
        return [*([self._current] if self._current else []), *self._queue, *([fetching] if fetching else [])]

    def _known(self, operation_id: str, request: Scale | RestartEngines) -> ScalingOperation | None:
        known = {operation.operation_id: operation for operation in [*self._past.values(), *self._operations]}
        operation = known.get(operation_id)
        if operation is not None and operation.request != request:
            raise WrongState(f"operation {operation_id} asked for something else: give another operation id")
        return operation

    def _check_manual(self, request: Scale | RestartEngines) -> None:
        """Refuse another number of engines while the autoscaler decides about it."""
        if self.autoscale is None or not isinstance(request, Scale):
            return
        if request.num_engines is not None or request.remove_ranks:
            limits = self.autoscale()
            raise WrongState(
                f"the number of engines follows the load (`autoscale` {limits['min']}:{limits['max']}) and cannot be "
                "set: start without `autoscale` to set it, or restart engines to replace them"
            )

    def _find(self, operation_id: str | None) -> ScalingOperation | None:
        if operation_id is None:
            return self._current or self._fetch.operation or next(reversed(self._past.values()), None)
        known = {operation.operation_id: operation for operation in [*self._past.values(), *self._operations]}
        if operation_id not in known:
            raise NotFound(f"there is no scaling operation {operation_id!r}; the last {MAX_PAST} are kept")
        return known[operation_id]

    def _begin_fetch(
        self, operation_id: str, request: Scale | RestartEngines, caller: ClientId | None
    ) -> ScalingOperation:
        """Check a request and have its checkpoint fetched. It replaces one whose checkpoint is fetched."""
        operation = self._accept(operation_id, request)
        if (former := self._fetch.operation) is not None:
            self._fetch.end()
            self._finish(former, WrongState(f"it was replaced by operation {operation_id}"))
        self._fetch.begin(operation, caller)
        return operation

    def _accept(self, operation_id: str, request: Scale | RestartEngines) -> ScalingOperation:
        """Return an operation that may begin. Raises the reason why it may not."""
        if (error := self._forbidden(request)) is not None:
            raise error
        self._changes.check(request)
        return ScalingOperation(operation_id, request, began=self._turn.now)

    def _enqueue(self, operation_id: str, request: Scale | RestartEngines, caller: ClientId | None) -> ScalingOperation:
        """Check a request and queue it. It replaces one that waits or prepares: only the newest target counts."""
        operation = self._accept(operation_id, request)
        replaced = WrongState(f"it was replaced by operation {operation_id}")
        for waiting in self._queue:
            self._finish(waiting, replaced)
        self._queue = [operation]
        if self._current is not None and self._current.phase == "preparing" and not self._current.error:
            self._current.until = Until(_raising(replaced), lambda: "")
        return operation

    def _begin(self, operation: ScalingOperation) -> None:
        self._current = operation
        match operation.request:
            case Scale() as request:
                operation.steps = self._changes.steps_of(operation, request)
            case RestartEngines() as request:
                if operation.fetched is not None:
                    request = msgspec.structs.replace(request, options=operation.fetched)
                operation.steps = self._restarts.steps_of(operation, request)

    def _roll_back(self, operation: ScalingOperation, error: EagleRayError) -> None:
        """Continue a failed operation with the removal of what it has begun."""
        operation.until, operation.deadline, operation.error = None, None, error
        is_restart = isinstance(operation.request, RestartEngines)
        undo = self._restarts.undo if is_restart else self._changes.remove_held
        operation.steps = undo(operation, error)

    def _end(self, operation: ScalingOperation, error: EagleRayError | None) -> None:
        self._finish(operation, error)
        self._current = None
        self._set_timer()

    def _finish(self, operation: ScalingOperation, error: EagleRayError | None) -> None:
        operation.phase, operation.error = "completed" if error is None else "failed", error
        operation.seconds = self._turn.now - operation.began
        operation.steps = operation.until = operation.deadline = None
        self._past[operation.operation_id] = operation
        while len(self._past) > MAX_PAST:
            del self._past[next(iter(self._past))]
        outcome = "took" if error is None else "failed after"
        cause = "" if error is None else f": {error}"
        logger.log(
            logging.INFO if error is None else logging.DEBUG if operation.is_automatic else logging.WARNING,
            "scaling (operation %s) %s %.2f s%s; the engines are %s",
            operation.operation_id,
            outcome,
            operation.seconds,
            cause,
            self._changes.ranks,
        )
        for caller in operation.callers:
            self._answer(caller, error or self._describe(operation))
        operation.callers = []

    # Answers.

    def _describe(self, operation: ScalingOperation | None) -> dict[str, Any]:
        """Describe an operation and the fleet for users."""
        ranks = self._changes.ranks
        answer: dict[str, Any] = {
            "instance_id": self._instance,
            "operation_id": None,
            "kind": None,
            "phase": "idle",
            "active_data_parallel_size": len(ranks),
            "participating_ranks": ranks,
            "active_api_server_count": self._changes.num_api_servers,
            "engine_options": self._restarts.changes,
            "safe_to_delete_ranks": [],
            "waiting_for": None,
            "last_error": None,
            "is_retryable": True,
            "seconds": None,
        }
        if self.autoscale is not None:
            answer["autoscale"] = self.autoscale()
        if operation is None:
            return answer
        request = operation.request
        if isinstance(request, Scale):
            answer["requested_data_parallel_size"] = request.num_engines
            answer["requested_api_server_count"] = request.num_api_servers
        else:
            answer["requested_options"] = request.options if operation.fetched is None else operation.fetched
        began = self._turn.now - operation.began
        return answer | {
            "operation_id": operation.operation_id,
            "kind": "scale" if isinstance(request, Scale) else "restart",
            "phase": operation.phase,
            "safe_to_delete_ranks": operation.removed,
            "waiting_for": None if operation.has_ended else self._progress(operation),
            "last_error": None if operation.error is None else str(operation.error),
            "is_retryable": not isinstance(operation.error, InvalidRequest),
            "seconds": round(began if operation.seconds is None else operation.seconds, 3),
        }

    def _progress(self, operation: ScalingOperation) -> str:
        """Describe what an operation waits for."""
        if operation is self._fetch.operation:
            return self._fetch.reason
        if operation is not self._current:
            current = self._current
            return "it is queued" if current is None else f"it is queued behind operation {current.operation_id}"
        return "" if operation.until is None else operation.until.reason()

    def _answer(self, caller: Caller, outcome: dict[str, Any] | EagleRayError) -> None:
        if not self._changes.is_present(caller.client):
            return
        if isinstance(outcome, EagleRayError):
            returned = ControlReturned(call_id=caller.call_id, failure=Failure.of(outcome))
        else:
            returned = ControlReturned(call_id=caller.call_id, answer=pack(outcome))
        self._turn.send(returned, caller.client)

    def _answer_callers_at(self, operation: ScalingOperation, server: MemberId) -> None:
        """Answer the callers at an API server that goes, and therefore cannot wait for the end of the operation."""
        for caller in [caller for caller in operation.callers if replica_key(caller.client) == server]:
            operation.callers.remove(caller)
            self._answer(caller, self._describe(operation))

    def _set_timer(self) -> None:
        deadlines = [caller.deadline for operation in self._operations for caller in operation.callers]
        deadlines += [operation.deadline for operation in self._operations if operation.deadline is not None]
        if deadlines:
            self._turn.timers.set(ScalingTimer(), min(deadlines))
        else:
            self._turn.timers.cancel(ScalingTimer())


def _raising(error: EagleRayError) -> Callable[[], bool]:
    def holds() -> bool:
        raise error

    return holds
