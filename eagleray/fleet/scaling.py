"""Operations that change which engines and API servers run: scaling, and restarts one after another.

Pure. Each operation is a generator that yields steps, which `FleetState` carries out in the same turn; at an `Until` it
goes on when the condition holds. It goes on without its caller, and a caller that asks again with the same id finds it.
What has begun is either completed or rolled back: engines that were added are unknown to clients until all of them are
ready.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from eagleray.errors import DeadlineExceeded, EagleRayError, EngineFailed, InvalidRequest, NotFound, WrongState
from eagleray.fleet import timeouts
from eagleray.fleet.control.control_operation import Caller
from eagleray.fleet.replica import Replica, Up
from eagleray.fleet.turn import ScalingTimer, Turn
from eagleray.identity import ClientId, EngineId, MemberId, replica_key
from eagleray.log import get_logger
from eagleray.messages.control import ControlCall, ControlReturned
from eagleray.messages.failure import Failure
from eagleray.messages.plain import pack
from eagleray.messages.scaling import GetScaling, RestartEngines, Scale

logger = get_logger(__name__)

MAX_PAST = 100
"""Number of operations that have ended and whose outcome can be asked for."""

Phase = Literal["queued", "preparing", "draining", "committing", "completed", "failed"]

# Steps


class StartReplica(NamedTuple):
    """Start an engine or an API server. An engine is held back from clients until it is admitted."""

    key: MemberId


class Admit(NamedTuple):
    """Let clients send requests to engines that are ready."""

    keys: tuple[EngineId, ...]


class Drain(NamedTuple):
    """Have clients send no new requests to the engine."""

    key: EngineId


class Remove(NamedTuple):
    """Let the member go, with requests that still run on it moved. An API server has `grace` seconds to finish."""

    key: MemberId
    cause: str
    grace: float = 0.0


class RestartReplica(NamedTuple):
    """Replace the engine's process, with requests that still run on it moved."""

    key: EngineId
    cause: str


class Until(NamedTuple):
    """Wait until `holds`, which may raise the error that ends the operation. `reason`: what it waits for."""

    holds: Callable[[], bool]
    reason: Callable[[], str]


Step = StartReplica | Admit | Drain | Remove | RestartReplica | Until
Steps = Generator[Step, None, None]


@dataclass
class ScalingOperation:
    """An operation from its call to its end, and what is known of it later."""

    operation_id: str
    request: Scale | RestartEngines
    callers: list[Caller] = field(default_factory=list)
    phase: Phase = "queued"
    began: float = 0.0
    seconds: float | None = None
    """Time that the operation took, in seconds; None until it has ended."""
    error: EagleRayError | None = None
    steps: Steps | None = None
    until: Until | None = None
    deadline: float | None = None
    """Time by which engines that were added must be ready; None when there are none."""
    removed: list[int] = field(default_factory=list)
    """Ranks whose processes have exited."""

    @property
    def has_ended(self) -> bool:
        return self.phase in ("completed", "failed")


class _RolledBack(Exception):
    """Nothing of a failed operation is left."""

    def __init__(self, error: EagleRayError) -> None:
        super().__init__(str(error))
        self.error = error


class Scaling:
    """`replicas`: the replicas of the fleet by key, which only `FleetState` changes. `forbidden` returns the reason why
    no operation may begin now; None if one may. `shortage(num_added)` returns why so many engines more find no room;
    None if they do. `is_member` returns whether a client has not left."""

    def __init__(
        self,
        replicas: Mapping[MemberId, Replica],
        turn: Turn,
        *,
        instance: str,
        forbidden: Callable[[Scale | RestartEngines], EagleRayError | None],
        shortage: Callable[[int], str | None],
        is_member: Callable[[ClientId], bool],
    ) -> None:
        self._replicas = replicas
        self._turn = turn
        self._instance = instance
        self._forbidden = forbidden
        self._shortage = shortage
        self._is_member = is_member
        self.held: dict[EngineId, EngineId | None] = {}
        """Engines that are held back from clients, by replica key: the incarnation that is ready, or None."""
        self.undrained: dict[EngineId, set[ClientId]] = {}
        """Engines that drain: the clients with requests on them."""
        self._failures: dict[EngineId, EagleRayError] = {}
        """Errors of engines that were added and are given up."""
        self._current: ScalingOperation | None = None
        self._queue: list[ScalingOperation] = []
        self._past: dict[str, ScalingOperation] = {}
        """Operations that have ended, by id, the newest last."""

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
                operation = self._enqueue(call.operation_id, request)
        except EagleRayError as error:
            self._answer(caller, error)
            return
        if operation.has_ended:
            self._answer(caller, operation.error or self._describe(operation))
        else:
            operation.callers.append(caller)
            self._set_timer()

    def on_ready(self, engine: EngineId) -> bool:
        """Whether an engine that is ready is held back from clients."""
        if (key := replica_key(engine)) not in self.held:
            return False
        self.held[key] = engine
        return True

    def on_ended(self, engine: EngineId, error: EagleRayError | None) -> bool:
        """Handle the exit of an engine. `error`: why it is given up; None if a replacement follows. Returns whether
        clients do not know the engine."""
        key = replica_key(engine)
        self.undrained.pop(key, None)
        if key not in self.held:
            return False
        self.held[key] = None
        if error is not None:
            self._failures[key] = error
        return True

    def on_drained(self, client: ClientId, engine: EngineId) -> None:
        """Handle the report of a client that none of its requests runs on the engine."""
        self.undrained.get(replica_key(engine), set()).discard(client)

    def pass_time(self) -> None:
        """Answer the callers whose deadlines have passed. Their operations go on."""
        now = self._turn.now
        for operation in self._operations:
            for caller in [caller for caller in operation.callers if now >= caller.deadline]:
                operation.callers.remove(caller)
                late = f"operation {operation.operation_id} goes on: {self._progress(operation)}; ask for its status"
                self._answer(caller, DeadlineExceeded(late))

    def fail(self, error: EagleRayError) -> None:
        """End every operation, because the instance ends."""
        for operation in self._operations:
            self._finish(operation, error)
        self._queue.clear()
        self._current = None

    def next_step(self) -> Step | None:
        """Return the next step to carry out; None while there is nothing to do but wait."""
        while True:
            operation = self._current
            if operation is None:
                if not self._queue:
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
            except _RolledBack as rolled_back:
                self._end(operation, rolled_back.error)
            except EagleRayError as error:
                self._roll_back(operation, error)
            else:
                if not isinstance(step, Until):
                    return step
                operation.until = step

    # Operations.

    def _scale(self, operation: ScalingOperation, request: Scale) -> Steps:
        added, removed = self._engine_changes(request)
        yield from self._add_engines(operation, added, len(removed))
        operation.phase = "committing"
        added_servers, removed_servers = self._api_server_changes(request.num_api_servers)
        for server in added_servers:
            yield StartReplica(server)
        yield Admit(tuple(added))
        yield from self._drain(operation, removed, request.drain_timeout)
        operation.phase = "committing"
        for engine in removed:
            yield Remove(engine, "it was removed by scaling")
        for server in removed_servers:
            yield Remove(server, "it was removed by scaling", grace=request.drain_timeout)
        yield self._until_gone([*removed, *removed_servers])
        operation.removed = sorted(engine.rank for engine in removed)
        yield self._until_up(added_servers)

    def _add_engines(self, operation: ScalingOperation, added: Collection[EngineId], num_removed: int) -> Steps:
        """Start engines, and wait until all of them are ready."""
        operation.phase = "preparing"
        if not added:
            return
        if (shortage := self._shortage(len(added))) is not None:
            raise InvalidRequest(shortage, param="num_engines")
        for key in added:
            self.held[key] = None
            yield StartReplica(key)
        seconds = timeouts.SCALE_START_ATTEMPTS * max(self._replicas[key].start_seconds for key in added)
        operation.deadline = self._turn.now + seconds

        def are_ready() -> bool:
            for key in added:
                if error := self._failures.get(key):
                    raise error
            if operation.deadline is not None and self._turn.now >= operation.deadline:
                raise DeadlineExceeded(f"{_labels(self._unready(added))} did not start within {seconds:.0f} s")
            return not self._unready(added)

        yield Until(are_ready, lambda: f"{_labels(self._unready(added))} must start")
        operation.deadline = None

    def _restart(self, operation: ScalingOperation, request: RestartEngines) -> Steps:
        operation.phase = "committing"
        for rank in request.ranks or self._ranks:
            key = EngineId(self._instance, rank)
            replica = self._replicas.get(key)
            if replica is None or replica.expected is None:
                continue  # it was given up meanwhile
            former = replica.member
            yield from self._drain(operation, [key], request.drain_timeout)
            operation.phase = "committing"
            if replica.member == former and isinstance(replica.state, Up):  # else its replacement starts already
                yield RestartReplica(key, "it is restarted on purpose")

            def has_returned(replica: Replica = replica, former: MemberId = former) -> bool:
                if replica.expected is None:
                    raise EngineFailed(f"{former.label} was restarted and is given up; the later ones were left alone")
                return replica.member != former and isinstance(replica.state, Up)

            yield Until(has_returned, partial("the replacement of {} must start".format, former.label))

    def _drain(self, operation: ScalingOperation, engines: Collection[EngineId], seconds: float) -> Steps:
        """Have engines finish their requests, for at most `seconds`."""
        if seconds <= 0 or not engines:
            return
        operation.phase = "draining"
        operation.deadline = due = self._turn.now + seconds
        for key in engines:
            yield Drain(key)

        def have_finished() -> bool:
            busy = (client for key in engines for client in self.undrained.get(key, ()) if self._is_member(client))
            return self._turn.now >= due or not any(True for _ in busy)

        yield Until(have_finished, lambda: f"{_labels(engines)} must finish requests")
        operation.deadline = None
        for key in engines:
            self.undrained.pop(key, None)

    def _until_gone(self, keys: Collection[MemberId]) -> Until:
        def remaining() -> list[MemberId]:
            return [key for key in keys if key in self._replicas]

        return Until(lambda: not remaining(), lambda: f"{_labels(remaining())} must exit")

    def _until_up(self, keys: Collection[MemberId]) -> Until:
        def missing() -> list[MemberId]:
            return [key for key in keys if key in self._replicas and not self._replicas[key].is_settled]

        return Until(lambda: not missing(), lambda: f"{_labels(missing())} must start")

    # The engines and API servers that a request changes.

    @property
    def _ranks(self) -> list[int]:
        """Ranks of the engines that run or come back."""
        members = (replica.expected for key, replica in self._replicas.items() if key not in self.held)
        return sorted(member.rank for member in members if isinstance(member, EngineId))

    @property
    def _num_api_servers(self) -> int:
        return sum(isinstance(key, ClientId) for key in self._replicas)

    def _engine_changes(self, request: Scale) -> tuple[list[EngineId], list[EngineId]]:
        """Return the engines to add and to remove. An engine that was given up is started again rather than another."""
        ranks, named = self._ranks, set(request.remove_ranks)
        if unknown := sorted(named.difference(ranks)):
            raise InvalidRequest(f"there is no engine {unknown[0]}: the ranks are {ranks}", param="remove_ranks")
        target = len(ranks) - len(named) if request.num_engines is None else request.num_engines
        if target < 1:
            raise InvalidRequest(f"{target} engines were asked for: at least one must stay", param="num_engines")
        stay = [rank for rank in ranks if rank not in named]
        added = [rank for rank in range(len(ranks) + target) if rank not in ranks][: max(0, target - len(stay))]
        removed = sorted(named.union(stay[target:]))
        return [EngineId(self._instance, rank) for rank in added], [EngineId(self._instance, rank) for rank in removed]

    def _api_server_changes(self, target: int | None) -> tuple[list[ClientId], list[ClientId]]:
        indices = sorted(key.index for key in self._replicas if isinstance(key, ClientId))
        if target is None:
            return [], []
        added = [index for index in range(len(indices) + target) if index not in indices]
        added = added[: max(0, target - len(indices))]
        return [ClientId(self._instance, i) for i in added], [ClientId(self._instance, i) for i in indices[target:]]

    # The queue.

    @property
    def _operations(self) -> list[ScalingOperation]:
        return [*([self._current] if self._current else []), *self._queue]

    def _known(self, operation_id: str, request: Scale | RestartEngines) -> ScalingOperation | None:
        known = {operation.operation_id: operation for operation in [*self._past.values(), *self._operations]}
        operation = known.get(operation_id)
        if operation is not None and operation.request != request:
            raise WrongState(f"operation {operation_id} asked for something else: give another operation id")
        return operation

    def _find(self, operation_id: str | None) -> ScalingOperation | None:
        if operation_id is None:
            return self._current or next(reversed(self._past.values()), None)
        known = {operation.operation_id: operation for operation in [*self._past.values(), *self._operations]}
        if operation_id not in known:
            raise NotFound(f"there is no scaling operation {operation_id!r}; the last {MAX_PAST} are kept")
        return known[operation_id]

    def _enqueue(self, operation_id: str, request: Scale | RestartEngines) -> ScalingOperation:
        """Check a request and queue it. It replaces one that waits or prepares: only the newest target counts."""
        if (error := self._forbidden(request)) is not None:
            raise error
        self._check(request)
        operation = ScalingOperation(operation_id, request, began=self._turn.now)
        replaced = WrongState(f"it was replaced by operation {operation_id}")
        for waiting in self._queue:
            self._finish(waiting, replaced)
        self._queue = [operation]
        if self._current is not None and self._current.phase == "preparing":
            self._current.until = Until(_raising(replaced), lambda: "")
        return operation

    def _check(self, request: Scale | RestartEngines) -> None:
        """Raise `InvalidRequest` for a request that can never be executed."""
        if isinstance(request, RestartEngines):
            if unknown := sorted(set(request.ranks).difference(self._ranks)):
                raise InvalidRequest(f"there is no engine {unknown[0]}: the ranks are {self._ranks}", param="ranks")
            return
        self._engine_changes(request)
        if request.num_api_servers is not None:
            if not self._num_api_servers:
                raise InvalidRequest("this instance has no API servers to scale", param="num_api_servers")
            if request.num_api_servers < 1:
                raise InvalidRequest(
                    f"{request.num_api_servers} API servers were asked for: at least one must stay",
                    param="num_api_servers",
                )

    def _begin(self, operation: ScalingOperation) -> None:
        self._current = operation
        match operation.request:
            case Scale() as request:
                operation.steps = self._scale(operation, request)
            case RestartEngines() as restart:
                operation.steps = self._restart(operation, restart)

    def _roll_back(self, operation: ScalingOperation, error: EagleRayError) -> None:
        """Continue a failed operation with the removal of the engines that it has added."""
        operation.until = operation.deadline = None
        operation.steps = self._remove_held(error)

    def _remove_held(self, error: EagleRayError) -> Steps:
        held = list(self.held)
        for key in held:
            if key in self._replicas:
                yield Remove(key, "the operation that added it failed")
        self.held.clear()
        self._failures.clear()
        yield self._until_gone(held)
        raise _RolledBack(error)

    def _end(self, operation: ScalingOperation, error: EagleRayError | None) -> None:
        self._finish(operation, error)
        self._current = None

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
            logging.INFO if error is None else logging.WARNING,
            "scaling (operation %s) %s %.2f s%s; the engines are %s",
            operation.operation_id,
            outcome,
            operation.seconds,
            cause,
            self._ranks,
        )
        for caller in operation.callers:
            self._answer(caller, error or self._describe(operation))
        operation.callers = []

    # Answers.

    def _describe(self, operation: ScalingOperation | None) -> dict[str, Any]:
        """Describe an operation and the fleet for users."""
        ranks = self._ranks
        answer: dict[str, Any] = {
            "instance_id": self._instance,
            "operation_id": None,
            "phase": "idle",
            "active_data_parallel_size": len(ranks),
            "participating_ranks": ranks,
            "active_api_server_count": self._num_api_servers,
            "safe_to_delete_ranks": [],
            "waiting_for": None,
            "last_error": None,
            "is_retryable": True,
            "seconds": None,
        }
        if operation is None:
            return answer
        request = operation.request
        if isinstance(request, Scale):
            answer["requested_data_parallel_size"] = request.num_engines
            answer["requested_api_server_count"] = request.num_api_servers
        began = self._turn.now - operation.began
        return answer | {
            "operation_id": operation.operation_id,
            "phase": operation.phase,
            "safe_to_delete_ranks": operation.removed,
            "waiting_for": None if operation.has_ended else self._progress(operation),
            "last_error": None if operation.error is None else str(operation.error),
            "is_retryable": not isinstance(operation.error, InvalidRequest),
            "seconds": round(began if operation.seconds is None else operation.seconds, 3),
        }

    def _progress(self, operation: ScalingOperation) -> str:
        """Describe what an operation waits for."""
        if operation is not self._current:
            current = self._current
            return "it is queued" if current is None else f"it is queued behind operation {current.operation_id}"
        return "" if operation.until is None else operation.until.reason()

    def _unready(self, engines: Collection[EngineId]) -> list[EngineId]:
        return [key for key in engines if self.held.get(key) is None]

    def _answer(self, caller: Caller, outcome: dict[str, Any] | EagleRayError) -> None:
        if isinstance(outcome, EagleRayError):
            returned = ControlReturned(call_id=caller.call_id, failure=Failure.of(outcome))
        else:
            returned = ControlReturned(call_id=caller.call_id, answer=pack(outcome))
        self._turn.send(returned, caller.client)

    def _set_timer(self) -> None:
        deadlines = [caller.deadline for operation in self._operations for caller in operation.callers]
        deadlines += [operation.deadline for operation in self._operations if operation.deadline is not None]
        if deadlines:
            self._turn.timers.set(ScalingTimer(), min(deadlines))
        else:
            self._turn.timers.cancel(ScalingTimer())


def _labels(members: Collection[MemberId]) -> str:
    return ", ".join(member.label for member in members)


def _raising(error: EagleRayError) -> Callable[[], bool]:
    def holds() -> bool:
        raise error

    return holds
