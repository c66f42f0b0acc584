"""Execution of the supervisor's commands: pauses, sleep, the phases of a weight update.

Owns the engine's copy of the instance's state. Each command is a generator that yields a description of its wait while
it has to wait; the engine's loop resumes it after every step, so that messages are handled and steps go on meanwhile.
Commands are executed one after the other. Workers are called between steps: a step in flight is finished first, on all
stages, because every worker handles its calls in order.

Engines that share experts stop one by one, and a stopped engine takes part in the waves of the others until all have
stopped. Therefore the supervisor stops all of them before their memory changes (`InstanceState.is_held`).

Driven by the engine loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import msgspec

from eagleray.engine.adapters import EngineAdapters
from eagleray.engine.core import EngineCore
from eagleray.engine.weight_update import EngineWeightUpdate
from eagleray.errors import DeadlineExceeded
from eagleray.identity import EngineId
from eagleray.log import get_logger
from eagleray.messages.control import (
    AbortWeightUpdate,
    CheckWeights,
    CloseWeightTransfer,
    Command,
    CommandDone,
    DropAdapter,
    FetchWeights,
    InstanceState,
    OpenWeightTransfer,
    ReceiveWeights,
    ResetPrefixCache,
    ServeWeights,
    SetState,
    SleepTag,
    StageAdapter,
)
from eagleray.messages.failure import Failure
from eagleray.messages.steps import SleepWorker, WakeWorker, WorkerSlept, WorkerWoke
from eagleray.scheduler.step_outputs import AddressedChunk

logger = get_logger(__name__)

Result = dict[str, Any] | Failure
Execution = Generator[str, None, Result]
"""Execution of a command, which yields a noun phrase for its wait."""

DROPPING_LEVEL = 2
"""Level of sleep at which the weights are dropped."""


@dataclass
class _Task:
    command: Command
    deadline: float
    execution: Execution | None = None
    """None until the commands before are finished."""
    waits_for: str = "its turn"


class EngineControl:
    """Executes commands. `publish` sends chunks of aborted requests, `reply` sends replies to the supervisor."""

    def __init__(
        self,
        engine: EngineId,
        core: EngineCore,
        *,
        publish: Callable[[list[AddressedChunk]], None],
        reply: Callable[[CommandDone], None],
        host: str | None = None,
        update: int = 0,
    ) -> None:
        self.state = InstanceState()
        """State of the instance, as this engine has adopted it."""
        self.update: int | None = update
        """Number of the update whose weights the engine has; None if its weights are empty or a mixture."""
        self._engine = engine
        self._core = core
        self._publish = publish
        self._reply = reply
        self._adapters = EngineAdapters(core)
        self._updates = EngineWeightUpdate(core.executor, wait_seconds=lambda: core.call_seconds, host=host)
        self.tasks: deque[_Task] = deque()
        """Commands that are not finished, in order. While there are some, `advance` must be called often."""

    def adopt(self, state: InstanceState, *, timeout: float) -> None:
        """Adopt the state of the instance at the start, before the engine has requests."""
        execution = self._set_state(SetState(state=state), timeout, is_start=True)
        for waits_for in execution:
            raise AssertionError(f"an engine without requests waits for {waits_for}")

    def add(self, command: Command, now: float) -> None:
        """Queue a command."""
        self.tasks.append(_Task(command, now + command.timeout))

    def advance(self, now: float) -> bool:
        """Execute commands as far as possible, and return whether one was finished."""
        has_finished = False
        while self.tasks:
            result = self._result(self.tasks[0], now)
            if result is None:
                break
            self._finish(self.tasks.popleft(), result)
            has_finished = True
        return has_finished

    def _result(self, task: _Task, now: float) -> Result | None:
        """Continue a command. Returns None while it waits."""
        if task.execution is None:
            task.execution = self._execute(task.command)
        try:
            task.waits_for = next(task.execution)
        except StopIteration as end:
            result: Result = end.value
            return result
        if now < task.deadline:
            return None
        task.execution.close()
        seconds, name = task.command.timeout, type(task.command.body).__name__
        error = f"{self._engine.label} has not executed {name} within {seconds:g} s: it waits for {task.waits_for}"
        return Failure.of(DeadlineExceeded(error))

    def _finish(self, task: _Task, result: Result) -> None:
        number = task.command.number
        if isinstance(result, Failure):
            self._reply(CommandDone(member=self._engine, number=number, failure=result))
        else:
            self._reply(CommandDone(member=self._engine, number=number, result=result))

    def _execute(self, command: Command) -> Execution:
        match command.body:
            case SetState():
                return (yield from self._set_state(command.body, command.timeout))
            case ResetPrefixCache(reset_running_requests=reset_running_requests):
                return (yield from self._reset_prefix_cache(reset_running_requests))
            case OpenWeightTransfer() as body:
                return (yield from self._updates.open_transfer(body, is_cancelled=lambda: self._is_broken_off))
            case CloseWeightTransfer():
                return self._updates.close_transfer()
            case ReceiveWeights() as body:
                return (yield from self._updates.receive(body, is_cancelled=lambda: self._is_broken_off))
            case CheckWeights() as body:
                return self._updates.check(body)
            case AbortWeightUpdate():
                return self._drop_update()
            case ServeWeights() as body:
                return self._updates.serve(body, command.timeout)
            case FetchWeights() as body:
                return (yield from self._fetch_weights(body, command.timeout))
            case StageAdapter(adapter):
                return (yield from self._adapters.load(adapter, command.timeout))
            case DropAdapter(number):
                self._adapters.drop(number)
                return {}
            case body:
                return Failure.noticed(f"{self._engine.label} does not execute {type(body).__name__}")

    # The state.

    def _set_state(self, command: SetState, timeout: float, *, is_start: bool = False) -> Execution:
        scheduler = self._core.scheduler
        before, state = self.state, command.state
        changes_memory = state.asleep != before.asleep or state.sleep_level > before.sleep_level
        applies_update = state.update not in (before.update, self.update)
        starts_update = not is_start and state.open_update not in (None, before.open_update)
        if self._core.waves is not None and not is_start and before.may_step and (changes_memory or applies_update):
            return Failure.noticed(f"{self._engine.label} shares experts, so all engines must be held before")
        num_aborted = 0
        if command.abort_running:
            yield from self._stop()
            num_aborted = self._abort_all()
        if _drains(state) and self.update is not None:
            scheduler.drain()
            while not scheduler.is_drained and not self._is_superseded:
                yield f"{scheduler.stats().num_running} running requests"
        if not state.may_step or changes_memory or applies_update or command.clear_cache:
            yield from self._stop()
        if failure := self._wake(before, state, timeout):
            return failure
        self.state = state  # only now: a deadline may have ended the waits above
        freed_bytes = self._sleep(before, state, timeout)
        if starts_update and isinstance(outcome := self._start_update(state), Failure):
            return outcome
        if applies_update and self._updates.apply(state.update, timeout):
            self.update = state.update
        if state.update == self.update:
            scheduler.set_weights(update=state.update, version=state.weight_version)
        yield from self._adapters.adopt(state, timeout, needs_all=is_start and self._engine.incarnation == 0)
        if command.clear_cache and not scheduler.reset_prefix_cache():
            logger.info("the prefix cache is not emptied, because requests that were kept have blocks of it")
        self._continue()
        return self._describe(num_aborted, freed_bytes)

    def _start_update(self, state: InstanceState) -> Result:
        """Have the workers open the update of the state."""
        assert state.open_update is not None
        return self._updates.start(state.open_update, is_in_place=state.is_in_place)

    def _fetch_weights(self, command: FetchWeights, timeout: float) -> Execution:
        """Replace weights that are unusable or older than those of the instance."""
        yield from self._stop()
        self.update = None
        outcome = yield from self._updates.fetch(command, timeout, is_cancelled=lambda: self._is_broken_off)
        if not isinstance(outcome, Failure):
            self.update = command.update
            if self.state.update == command.update:
                version = self.state.weight_version
                self._core.scheduler.set_weights(update=command.update, version=version)
            self._continue()
        return outcome

    def _drop_update(self) -> Result:
        """Have the workers drop the open update. The weights are unusable if some were overwritten in place."""
        outcome = self._updates.drop()
        if self._updates.is_torn:
            self.update = None
        return outcome

    def _stop(self) -> Execution:
        """Stop planning, and wait until no step is in flight."""
        self._core.scheduler.stop()
        while not self._core.is_settled:
            yield "steps in flight"
        return {}

    def _continue(self) -> None:
        """Plan steps again if the state allows it."""
        if self.state.may_step and self.update is not None:
            self._core.scheduler.start()

    def _abort_all(self) -> int:
        chunks = self._core.scheduler.abort_all()
        self._publish(chunks)
        return len(chunks)

    def _wake(self, before: InstanceState, state: InstanceState, timeout: float) -> Failure | None:
        """Have the workers allocate the memory of the parts that wake. Returns a failure, and all parts stay asleep, if
        a device has too little memory."""
        asleep = _memory_tags(before)
        woken = tuple(tag for tag in asleep if tag not in state.asleep)
        if not woken:
            return None
        replies = self._core.executor.call(WakeWorker(tags=woken), WorkerWoke, timeout=timeout)
        failure = next((reply.failure for reply in replies if reply.failure is not None), None)
        if failure is not None:
            self._call_sleep(asleep, before.sleep_level, timeout)
        return failure

    def _sleep(self, before: InstanceState, state: InstanceState, timeout: float) -> int:
        """Have the workers free the memory of the parts that fall asleep. Returns its size in bytes."""
        asleep, tags = _memory_tags(before), _memory_tags(state)
        if set(tags) <= set(asleep) and state.sleep_level <= before.sleep_level:
            return 0
        if "kv_cache" in tags and "kv_cache" not in asleep:
            self._core.scheduler.preempt_all()
            self._core.scheduler.reset_prefix_cache()
        if "weights" in tags and state.sleep_level >= DROPPING_LEVEL:
            self.update = None
        return self._call_sleep(tags, state.sleep_level, timeout)

    def _call_sleep(self, tags: tuple[SleepTag, ...], level: int, timeout: float) -> int:
        replies = self._core.executor.call(SleepWorker(tags=tags, level=level), WorkerSlept, timeout=timeout)
        return sum(reply.freed_bytes for reply in replies)

    @property
    def _is_superseded(self) -> bool:
        """Whether a later state ends the wait of the current command."""
        return any(isinstance(task.command.body, SetState) for task in list(self.tasks)[1:])

    @property
    def _is_broken_off(self) -> bool:
        """Whether a later command ends the receiving or fetching of weights."""
        later = (task.command.body for task in list(self.tasks)[1:])
        return any(isinstance(body, AbortWeightUpdate | CloseWeightTransfer) for body in later)

    def _describe(self, num_aborted: int, freed_bytes: int = 0) -> dict[str, Any]:
        return {
            "num_kept": self._core.scheduler.num_requests,
            "num_aborted": num_aborted,
            "freed_bytes": freed_bytes,
            "update": self.update,
        }

    # The prefix cache.

    def _reset_prefix_cache(self, reset_running_requests: bool) -> Execution:
        scheduler = self._core.scheduler
        try:
            if reset_running_requests or scheduler.stats().num_running == 0:
                yield from self._stop()  # steps in flight have blocks, also those of requests that have just finished
            if reset_running_requests:
                scheduler.preempt_all()
            return {"success": scheduler.reset_prefix_cache()}
        finally:
            self._continue()  # at the deadline too, because no later command would continue


def _drains(state: InstanceState) -> bool:
    """Whether the running requests must finish before this state holds. The former state does not matter: the wait of
    an earlier command for the same pause may have ended early, see `EngineControl._is_superseded`."""
    return state.pause == "wait" and msgspec.structs.replace(state, pause=None).may_step


def _memory_tags(state: InstanceState) -> tuple[SleepTag, ...]:
    """Return the parts that are asleep and have memory of their own."""
    return tuple(tag for tag in state.asleep if tag != "scheduling")
