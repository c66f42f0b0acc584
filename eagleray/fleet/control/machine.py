"""The state machine of an instance: one operation at a time, from call to answer, also when members exit.

Pure: it is driven by events with their times (calls, replies, joins, exits, passing of time), and returns effects. Each
operation is a generator (`operations`, `weight_update`, `adapters`); this module queues operations, passes them the
replies that they await, and ends them at their deadlines. An operation goes on when its caller disappears. Driven by
`FleetState`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from eagleray.config.lora_modules import lora_modules
from eagleray.config.resolve import expert_engines, local_ranks, served_names
from eagleray.config.sections import Config
from eagleray.errors import DeadlineExceeded, EagleRayError, TransferBroken, WrongState
from eagleray.fleet import timeouts
from eagleray.fleet.control import operations
from eagleray.fleet.control.caller import Caller
from eagleray.fleet.control.control_operation import ControlOperation, key_of
from eagleray.fleet.control.dispatch import steps_of
from eagleray.fleet.control.instance import Effect, EngineRecord, MemberFailed, SendAnswer, SteeredInstance
from eagleray.fleet.control.operations import Answer, Commands, Condition, Replies
from eagleray.fleet.control.rules import NAMES, check_state, may_resume
from eagleray.fleet.control.weight_sources import WeightDirectory, WeightSources
from eagleray.fleet.control.weight_update import WeightUpdates
from eagleray.hub.locate import model_root
from eagleray.identity import ClientId, EngineId, MemberId
from eagleray.log import get_logger
from eagleray.messages.control import (
    AbortRequests,
    AbortWeightUpdate,
    CommandDone,
    ControlCall,
    ControlRequest,
    ControlReturned,
    FinishWeightUpdate,
    GetWeightInfo,
    InitWeightTransfer,
    InstanceState,
    Pause,
    ResetPrefixCache,
    Resume,
    SetState,
    StartWeightUpdate,
    UpdateWeights,
)
from eagleray.messages.failure import Failure
from eagleray.messages.plain import pack
from eagleray.messages.scaling import FleetRequest

logger = get_logger(__name__)

REPEATABLE = (AbortRequests, ResetPrefixCache)
"""Calls that are allowed in every state and are executed each time, even with the id of the last operation."""

UPDATE_CALLS = (StartWeightUpdate, UpdateWeights, FinishWeightUpdate)
"""Calls of a trainer, each of which restarts `weight_update_timeout`."""


class Control:
    """See the module. `weight_update_timeout`: seconds without a call of the trainer after which an open update is
    aborted."""

    def __init__(
        self, instance: SteeredInstance, *, weight_update_timeout: float, checkpoint: str | None = None
    ) -> None:
        self._instance = instance
        self._sources = WeightSources(instance, checkpoint=checkpoint)
        self._updates = WeightUpdates(instance, self._sources)
        self._weight_update_timeout = weight_update_timeout
        self._trainer_due: float | None = None
        """Time at which the open update is aborted unless the trainer calls; None without an open update."""
        self._former_weights: tuple[int, str, list[WeightDirectory]] | None = None
        """Number, name and directories of the weights before `use_checkpoint`."""
        self._current: ControlOperation | None = None
        self._queue: list[ControlOperation] = []
        self._is_regrouping = False
        """Whether engines exchange experts, which they have in memory that no call may change meanwhile."""
        self.deadline: float | None = None
        """Time of the next `pass_time`; None if no deadline is pending."""
        self._last_outcome: tuple[bytes, Answer] | None = None
        """Key and answer of the last operation, if it succeeded, for a caller that repeats it. It is forgotten when
        another one begins, because a program may give all its calls the same id."""

    @property
    def state(self) -> InstanceState:
        return self._instance.state

    @property
    def next_update(self) -> int:
        """The number of the next weight update."""
        return self._instance.next_update

    @property
    def weights_are_changing(self) -> bool:
        """Whether an update is open, or a trainer is connected to a fixed number of workers."""
        transfer = self._instance.transfer
        is_connected = transfer is not None and transfer.is_collective and transfer.broken is None
        return self.state.open_update is not None or is_connected

    @property
    def regrouping_obstacle(self) -> str | None:
        """What must happen before engines may exchange experts; None if they may: no command of a call is executed, no
        weights change, and no memory sleeps. A call may wait for engines that start, which wait for the exchange."""
        if (current := self._current) is not None and current.awaited:
            return f"{current.name} (operation {current.operation_id}) must end"
        if self.state.open_update is not None:
            return f"weight update {self.state.open_update} must be finished or aborted"
        if self.weights_are_changing:
            return "the trainer must call shutdown_weight_transfer_engine"
        return f"{', '.join(self.state.asleep)} must wake up (wake_up)" if self.state.asleep else None

    @property
    def is_regrouping(self) -> bool:
        """Whether calls wait for engines that exchange experts."""
        return self._is_regrouping

    # Events.

    @classmethod
    def of(cls, config: Config, instance: str) -> Control:
        """Return the state machine of an instance that starts."""
        parallel = config.parallel
        steered = SteeredInstance(
            instance,
            ranks=local_ranks(config),
            workers_per_engine=parallel.world_size,
            num_workers=parallel.data_parallel_size * parallel.world_size,
            shares_experts=expert_engines(config) > 1,
            adapters=lora_modules(config),
            max_adapters=config.lora.max_loras if config.lora.enable_lora else 0,
            model_names=served_names(config.model),
            updates_in_place=config.execution.weight_update == "in-place",
        )
        return cls(
            steered,
            weight_update_timeout=config.recovery.weight_update_timeout,
            checkpoint=None if config.model.load_format == "dummy" else model_root(config.model),
        )

    def use_checkpoint(self, update: int, directory: str, now: float) -> list[Effect]:
        """Have the weights of another checkpoint be those of the instance, as `update`. Engines that have joined with
        other weights go on with them, and no engine joins with others from now on."""
        self._instance.now = now
        self._former_weights = (self.state.update, self.state.weight_version, self._sources.directories)
        self._sources.directories = [WeightDirectory(update, directory, "")]
        self._instance.assign(self._instance.changed(update=update, weight_version=str(update)))
        return self._effects()

    def restore_weights(self, now: float) -> list[Effect]:
        """Have the weights from before `use_checkpoint` be those of the instance again."""
        self._instance.now = now
        assert self._former_weights is not None
        update, version, self._sources.directories = self._former_weights
        self._instance.assign(self._instance.changed(update=update, weight_version=version))
        return self._effects()

    def keep_weights(self, reason: str | None) -> None:
        """Allow no change of the weights for this reason; None ends that."""
        self._instance.weights_kept_because = reason

    def set_ranks(self, ranks: Iterable[int]) -> None:
        """Record that the instance has engines of these ranks from now on."""
        self._instance.set_ranks(ranks)

    def set_regrouping(self, is_regrouping: bool, now: float) -> list[Effect]:
        """Let calls wait while engines exchange experts."""
        self._instance.now = now
        self._is_regrouping = is_regrouping
        return self._effects()

    def call(self, call: ControlCall, now: float) -> list[Effect]:
        """Queue a call, or let it join an equal one that is in progress."""
        self._instance.now = now
        limit = timeouts.CALL_TIMEOUT_LIMIT_SECONDS
        timeout = call.timeout if 0 < call.timeout < limit else limit
        caller = Caller(call.client, call.call_id, now + timeout)
        if isinstance(call.request, GetWeightInfo):
            self._answer(caller, self._weight_info())
            return self._effects()
        assert not isinstance(call.request, FleetRequest)
        key, request = key_of(call), call.request
        if self._last_outcome is not None and key == self._last_outcome[0]:
            self._answer(caller, self._last_outcome[1])
        elif same := self._find_same(key, request):
            same.callers.append(caller)
            same.deadline = max(same.deadline, caller.deadline)
        else:
            self._make_way_for(request)
            self._queue.append(ControlOperation(key, call.operation_id, request, [caller], deadline=caller.deadline))
        return self._effects()

    def on_done(self, done: CommandDone, now: float) -> list[Effect]:
        """Handle a reply. Even a reply that no operation awaits reports the update that the engine has."""
        self._instance.now = now
        record = self._instance.engines.get(done.member) if isinstance(done.member, EngineId) else None
        former_update = None if record is None else record.update
        command = record.unanswered.pop(done.number, None) if record is not None else None
        if record is not None and isinstance(command, SetState) and done.failure is None:
            record.update = done.result.get("update", record.update)
        self._sources.on_done(done)
        current = self._current
        is_awaited = current is not None and current.awaited.get(done.number) == done.member
        if current is not None and is_awaited:
            del current.awaited[done.number]
            if done.failure is None:
                current.replies.results[done.member] = done.result
            else:
                current.replies.failures[done.member] = done.failure
                if current.fails_fast:
                    current.awaited.clear()
        if record is not None and command is not None and done.failure is not None:
            self._on_failure(record, command, done.failure, is_awaited=is_awaited)
        is_one_of_many = is_awaited and current is not None and bool(current.awaited) and done.failure is None
        if is_one_of_many and (record is None or (record.has_joined and record.update == former_update)):
            return []  # so that the replies of all engines to one call take linear time
        return self._effects()

    def attach(self, member: MemberId, now: float) -> InstanceState:
        """Add a member that is being attached. Returns the state for its `Attach`."""
        self._instance.now = now
        if isinstance(member, EngineId):
            self._instance.engines[member] = EngineRecord(member, sent=self.state)
        else:
            self._instance.clients.add(member)
        return self.state

    def start(self, engine: EngineId, update: int, now: float) -> list[Effect]:
        """Handle the start of an engine with the weights of `update`. The engine joins when it is up to date."""
        self._instance.now = now
        if (record := self._instance.engines.get(engine)) and not record.is_started:
            record.is_started, record.update = True, update
            self._instance.absent.pop(engine.rank, None)
            self._instance.open_transfer_on(engine)
        return self._effects()

    def leave(self, member: MemberId, cause: str, returns: bool, now: float) -> list[Effect]:
        """Handle the exit of a member, which need not have been attached."""
        self._instance.now = now
        if isinstance(member, ClientId):
            self._instance.clients.discard(member)
            for operation in self._operations:
                operation.callers = [caller for caller in operation.callers if caller.client != member]
        else:
            self._instance.engines.pop(member, None)
            self._sources.on_exit(member)
            self._instance.absent[member.rank] = cause, returns
            self._break_transfer(f"{member.label} ended: {cause}")
        if current := self._current:
            for number in [number for number, awaited in current.awaited.items() if awaited == member]:
                del current.awaited[number]
                current.replies.exits[member] = cause
        return self._effects()

    def pass_time(self, now: float) -> list[Effect]:
        """Answer the callers and end the operations whose deadlines have passed."""
        self._instance.now = now
        if (current := self._current) and now >= current.deadline:
            reason = self._reason(current)
            self._throw(DeadlineExceeded(f"{current.name}: time limit reached: {reason}"))
            self._replace_refusing()
        for operation in self._operations:
            for caller in [caller for caller in operation.callers if now >= caller.deadline]:
                operation.callers.remove(caller)
                reason = self._reason(operation)
                self._answer(caller, DeadlineExceeded(f"{operation.name}: time limit reached: {reason}"))
        self._queue = [operation for operation in self._queue if now < operation.deadline]
        for record in list(self._instance.engines.values()):
            if record.due is not None and now >= record.due:
                record.due = None
                self._instance.replace(record.engine, "it did not adopt the state of the instance in time")
        if self._trainer_due is not None and now >= self._trainer_due and self._current is None:
            number, seconds = self.state.open_update, self._weight_update_timeout
            error = WrongState(
                f"weight update {number} was aborted, because no call of it came for {seconds:g} s (option "
                "`weight_update_timeout`); the old weights stay: start another"
            )
            logger.warning("%s", error)
            self._updates.drop(error)
        return self._effects()

    # Replies.

    def _on_failure(
        self, record: EngineRecord, command: SetState | AbortWeightUpdate, failure: Failure, *, is_awaited: bool
    ) -> None:
        """Replace an engine that could not drop the tensors of an update, or could not adopt the newest state. An
        engine that waits too long for requests to finish has adopted it, and is kept."""
        has_weights = isinstance(command, SetState) and record.update in (None, command.state.update)
        is_late = failure.kind == DeadlineExceeded.__name__ and record.has_joined and has_weights
        if isinstance(command, AbortWeightUpdate):
            self._instance.replace(record.engine, f"it could not drop a weight update: {failure}")
        elif not is_late and command.state == record.sent:
            record.refusal = failure
            if not is_awaited:
                self._replace_refusing()

    def _replace_refusing(self) -> None:
        """Replace the engines that could not adopt the newest state, which no operation restores any more."""
        for record in list(self._instance.engines.values()):
            if record.refusal is not None and record.sent == self.state:
                reason = f"it could not adopt the state of the instance: {record.refusal}"
                self._instance.replace(record.engine, reason)

    def _break_transfer(self, cause: str) -> None:
        """React to the exit of an engine: a collective transfer breaks, with the call that receives tensors by it. An
        update in which too few engines take part is dropped."""
        instance, current = self._instance, self._current
        if instance.transfer is not None and instance.transfer.is_collective and instance.transfer.broken is None:
            instance.close_transfer(cause)
            is_receiving = current is not None and (
                isinstance(current.request, InitWeightTransfer)
                or (isinstance(current.request, UpdateWeights) and current.request.weight_dir is None)
            )
            if is_receiving and current is not None and current.awaited:
                self._throw(TransferBroken(f"the transfer of weights broke: {cause}; the old weights stay"))
        if instance.state.open_update is not None and instance.lacks_participants:
            error = self._updates.engines_missing(cause)
            if self._current is not None and isinstance(self._current.request, UPDATE_CALLS):
                self._throw(error)
            else:
                self._updates.drop(error)

    def _weight_info(self) -> Answer:
        return operations.weight_info(self._instance, self._describe_current(), self._updates.dropped_in_pause)

    # The queue.

    @property
    def _operations(self) -> list[ControlOperation]:
        """The current operation, if there is one, and the queued ones in their order."""
        return [*([self._current] if self._current else []), *self._queue]

    def _find_same(self, key: bytes, request: ControlRequest) -> ControlOperation | None:
        """Return the operation in progress that a call repeats."""
        for operation in self._operations:
            is_one_shot = isinstance(request, UpdateWeights) and request.weight_dir is not None
            if operation.key == key or (is_one_shot and operation.request == request):
                return operation
        if isinstance(request, Pause) and self._operations and self._operations[-1].request == request:
            return self._operations[-1]
        return None

    def _reason(self, operation: ControlOperation) -> str:
        """Return the reason why an operation has not ended."""
        if self._is_regrouping and not operation.awaited:
            return "it waits for engines that exchange experts (GET /scale has the status)"
        return operation.reason(self._current, self._instance.now)

    def _describe_current(self) -> Answer | None:
        return None if self._current is None else self._current.describe(self._instance.now, len(self._queue))

    def _make_way_for(self, request: ControlRequest) -> None:
        """End the calls that a new one cancels: `resume` a pause, `abort_weight_update` a call of the update."""
        current = self._current.request if self._current is not None else None
        if isinstance(request, Resume) and may_resume(request, self.state):
            pauses = [operation for operation in self._queue if isinstance(operation.request, Pause)]
            self._queue = [operation for operation in self._queue if operation not in pauses]
            error = WrongState("the pause was ended by resume before all engines had paused")
            for operation in pauses:
                self._finish(operation, error)
            if isinstance(current, Pause):
                self._throw(error)
        elif isinstance(request, AbortWeightUpdate) and isinstance(current, UPDATE_CALLS) and self.state.open_update:
            self._throw(WrongState(f"{NAMES[type(current)]} was ended by abort_weight_update; the old weights stay"))

    def _run_queue(self) -> None:
        """Begin and continue operations as far as possible."""
        while True:
            current = self._current
            if self._is_regrouping:
                return
            if current is None:
                if not self._queue:
                    return
                self._begin(self._queue.pop(0))
            elif current.awaited or (current.condition is not None and not current.condition.holds()):
                return
            else:
                self._advance(current)

    def _begin(self, operation: ControlOperation) -> None:
        instance, request = self._instance, operation.request
        operation.began = instance.now
        if not isinstance(request, REPEATABLE):
            self._last_outcome = None
        try:
            dropped = self._updates.dropped_because
            is_late = isinstance(request, FinishWeightUpdate) or (
                isinstance(request, UpdateWeights) and request.weight_dir is None
            )
            if dropped is not None and self.state.open_update is None and is_late:
                failure = _failure_of(dropped)
                then = "start another one and push all tensors again"
                message = f"the weight update was dropped: {failure.message}; {then}"
                raise MemberFailed(msgspec.structs.replace(failure, message=message))
            check_state(
                request,
                instance,
                has_received=self._updates.received.num_calls > 0,
                repeats_commit=isinstance(request, FinishWeightUpdate) and self._updates.may_repeat(request),
            )
        except (EagleRayError, MemberFailed) as error:
            self._finish(operation, error)
        else:
            self._current = operation
            operation.steps = steps_of(request, instance, self._updates)
            self._resume(operation, None)

    def _advance(self, operation: ControlOperation) -> None:
        """Continue an operation with the replies that it has awaited."""
        replies, operation.replies, operation.condition = operation.replies, Replies(), None
        self._resume(operation, replies)

    def _resume(self, operation: ControlOperation, replies: Replies | None) -> None:
        assert operation.steps is not None
        try:
            awaited = next(operation.steps) if replies is None else operation.steps.send(replies)
        except StopIteration as stop:
            self._finish(operation, stop.value)
        except (EagleRayError, MemberFailed) as error:
            self._finish(operation, error)
        else:
            self._await(operation, awaited)

    def _await(self, operation: ControlOperation, awaited: Commands | Condition) -> None:
        if isinstance(awaited, Condition):
            operation.condition = awaited
            return
        operation.fails_fast = awaited.fails_fast
        timeout = operation.deadline - self._instance.now
        for member, body in awaited.bodies.items():
            operation.awaited[self._instance.send(member, body, timeout)] = member

    def _throw(self, error: Exception) -> None:
        """End the current operation with an error, after which its generator cleans up."""
        operation = self._current
        assert operation is not None
        assert operation.steps is not None
        try:
            operation.steps.throw(error)
        except (EagleRayError, MemberFailed) as raised:
            self._finish(operation, raised)
        else:
            raise AssertionError(f"{operation.name} continued after {error!r}")

    def _finish(self, operation: ControlOperation, outcome: Answer | Exception) -> None:
        """Answer the callers."""
        if operation is self._current:
            self._current = None
            if isinstance(operation.request, UPDATE_CALLS):
                self._trainer_due = None  # set again by `_effects`
        self._log(operation, outcome)
        for caller in operation.callers:
            self._answer(caller, outcome)
        operation.callers = []
        if not isinstance(outcome, Exception) and not isinstance(operation.request, REPEATABLE):
            self._last_outcome = operation.key, outcome

    def _log(self, operation: ControlOperation, outcome: Answer | Exception) -> None:
        seconds = 0.0 if operation.began is None else self._instance.now - operation.began
        name, state = f"{operation.name} (operation {operation.operation_id})", self.state
        if isinstance(outcome, Exception):
            logger.warning("%s failed after %.2f s: %s; the instance is %s", name, seconds, outcome, state.name)
            if traceback := _failure_of(outcome).traceback:
                logger.warning("%s", traceback.rstrip())
        elif not isinstance(operation.request, AbortRequests):
            version = f"weights {state.weight_version!r}, update {state.update}"
            logger.info("%s took %.2f s; the instance is %s, %s", name, seconds, state.name, version)

    def _answer(self, caller: Caller, outcome: Answer | Exception) -> None:
        if isinstance(outcome, Exception):
            returned = ControlReturned(call_id=caller.call_id, failure=_failure_of(outcome))
        else:
            returned = ControlReturned(call_id=caller.call_id, answer=pack(outcome))
        self._instance.effects.append(SendAnswer(caller.client, returned))

    def _effects(self) -> list[Effect]:
        """Continue the operations as far as possible, and return all effects since the last call."""
        instance = self._instance
        self._run_queue()
        if self.state.open_update is None:
            self._trainer_due = None
        elif self._trainer_due is None:
            self._trainer_due = instance.now + self._weight_update_timeout
        instance.review_weights()
        self._sources.review()
        instance.review()
        self.deadline = self._next_deadline()
        effects, instance.effects = instance.effects, []
        return effects

    def _next_deadline(self) -> float | None:
        times = [caller.deadline for operation in self._operations for caller in operation.callers]
        times += [operation.deadline for operation in self._operations]
        times += [record.due for record in self._instance.engines.values() if record.due is not None]
        if self._trainer_due is not None and self._current is None:
            times.append(self._trainer_due)
        if (retry_at := self._sources.deadline) is not None:
            times.append(retry_at)
        return min(times, default=None)


def _failure_of(error: Exception) -> Failure:
    return error.failure if isinstance(error, MemberFailed) else Failure.of(error)
