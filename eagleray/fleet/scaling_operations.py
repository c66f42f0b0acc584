"""The operations that change which engines and API servers run, and what they have begun.

Pure. Each operation is a generator that yields steps, which `FleetState` carries out in the same turn; at an `Until` it
goes on when the condition holds. What has begun is either completed or rolled back: engines that were added are unknown
to clients until all of them are ready. Driven by `Scaling`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from eagleray.errors import DeadlineExceeded, EagleRayError, EngineFailed, InvalidRequest
from eagleray.fleet import timeouts
from eagleray.fleet.control.caller import Caller
from eagleray.fleet.expert_rendezvous import ExpertRendezvous
from eagleray.fleet.membership import Membership
from eagleray.fleet.replica import Replica, Up
from eagleray.fleet.turn import Turn
from eagleray.identity import ClientId, EngineId, MemberId, replica_key
from eagleray.messages.scaling import RestartEngines, Scale

Phase = Literal["fetching", "queued", "preparing", "draining", "committing", "completed", "failed"]

Key = TypeVar("Key", EngineId, ClientId)

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


class Regroup(NamedTuple):
    """Form the expert group of the engines with these ranks. Those in `leaving` give their experts to the others."""

    ranks: tuple[int, ...]
    leaving: tuple[int, ...] = ()


class RestartReplica(NamedTuple):
    """Replace the engine's process, with requests that still run on it moved."""

    key: EngineId
    cause: str


class RestoreWeights(NamedTuple):
    """Have the weights count as the present ones that did so before an engine started with another checkpoint."""


class Until(NamedTuple):
    """Wait until `holds`, which may raise the error that ends the operation. `reason`: what it waits for."""

    holds: Callable[[], bool]
    reason: Callable[[], str]


Step = StartReplica | Admit | Drain | Remove | Regroup | RestartReplica | RestoreWeights | Until
Steps = Generator[Step, None, None]


@dataclass
class ScalingOperation:
    """An operation from its call to its end, and what is known of it later."""

    operation_id: str
    request: Scale | RestartEngines
    callers: list[Caller] = field(default_factory=list)
    is_automatic: bool = False
    """Whether the autoscaler has begun it, which logs its failures itself."""
    phase: Phase = "queued"
    began: float = 0.0
    seconds: float | None = None
    """Time that the operation took, in seconds; None until it has ended."""
    error: EagleRayError | None = None
    steps: Steps | None = None
    until: Until | None = None
    deadline: float | None = None
    """Time at which the operation stops waiting for what it waits for; None for members that exit, each of which has
    deadlines of its own."""
    fetched: dict[str, Any] | None = None
    """Options of a restart with the checkpoint that was found for them; None for one that names none."""
    removed: list[int] = field(default_factory=list)
    """Ranks of the engines that were removed, once their processes have exited."""

    @property
    def has_ended(self) -> bool:
        return self.phase in ("completed", "failed")


class RolledBack(Exception):
    """Nothing of a failed operation is left."""

    def __init__(self, error: EagleRayError) -> None:
        super().__init__(str(error))
        self.error = error


class FleetChanges:
    """`replicas`: the replicas of the fleet by key, which only `FleetState` changes. `shortage(num_added)` returns why
    that many added engines find no room; None if there is room. `rendezvous`: that of engines that share experts, which
    only `FleetState` changes; `regrouping_obstacle` returns what must happen before they may exchange experts; None if
    they may."""

    def __init__(
        self,
        replicas: Mapping[MemberId, Replica],
        membership: Membership,
        turn: Turn,
        *,
        instance: str,
        shortage: Callable[[int], str | None],
        rendezvous: ExpertRendezvous | None = None,
        regrouping_obstacle: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._replicas = replicas
        self.membership = membership
        self._turn = turn
        self._instance = instance
        self._shortage = shortage
        self._rendezvous = rendezvous
        self._regrouping_obstacle = regrouping_obstacle
        self.is_regrouping = False
        """Whether an operation that removes engines from an expert group has begun and not formed the last epoch."""
        self.held: dict[EngineId, EngineId | None] = {}
        """Engines that are held back from clients, by replica key: the incarnation that is ready, or None."""
        self.undrained: dict[EngineId, set[ClientId]] = {}
        """Engines that drain: the clients with requests on them."""
        self._loaded: set[EngineId] = set()
        """Keys of engines that are held back and can join the expert group."""
        self.failures: dict[EngineId, EagleRayError] = {}
        """Errors of engines that were added and are given up."""

    # Events.

    def on_ready(self, engine: EngineId) -> bool:
        """Whether an engine that is ready is held back from clients."""
        if (key := replica_key(engine)) not in self.held:
            return False
        self.held[key] = engine
        return True

    def on_loaded(self, engine: EngineId) -> None:
        """Record that an engine can join the expert group."""
        if (key := replica_key(engine)) in self.held:
            self._loaded.add(key)

    def on_ended(self, engine: EngineId, error: EagleRayError | None) -> bool:
        """Handle the exit of an engine. `error`: why it is given up; None if a replacement follows. Returns whether
        clients do not know the engine."""
        key = replica_key(engine)
        self.undrained.pop(key, None)
        if key not in self.held:
            return False
        self.held[key] = None
        self._loaded.discard(key)
        if error is not None:
            self.failures[key] = error
        return True

    def on_drained(self, client: ClientId, engine: EngineId) -> None:
        """Handle the report of a client that none of its requests runs on the engine."""
        replica = self._replicas.get(key := replica_key(engine))
        if replica is not None and replica.member == engine:
            self.undrained.get(key, set()).discard(client)

    def is_present(self, client: ClientId) -> bool:
        """Whether a client is attached and has not left."""
        return client in self.membership

    # Operations.

    def steps_of(self, operation: ScalingOperation, request: Scale) -> Steps:
        """Return the generator of an operation."""
        added, removed = self._engine_changes(request)
        yield from self._add_engines(operation, added)
        operation.phase = "committing"
        added_servers, removed_servers = self._api_server_changes(request.num_api_servers)
        for server in added_servers:
            yield StartReplica(server)
        yield Admit(tuple(added))
        yield from self._hand_over(operation, removed)  # before the drain, because it may show that they cannot go
        if self._rendezvous is not None and removed and self._rendezvous.shortage is not None:
            raise InvalidRequest(self._rendezvous.shortage, param="num_engines")
        yield from self.drain(operation, removed, request.drain_timeout)
        operation.phase = "committing"
        yield from self._leave_group(removed)
        for engine in removed:
            yield Remove(engine, "it was removed by scaling")
        for server in removed_servers:
            yield Remove(server, "it was removed by scaling", grace=request.drain_timeout)
        yield self.until_gone([*removed, *removed_servers])
        operation.removed = sorted(engine.rank for engine in removed)
        yield self._until_up(operation, added_servers)

    def remove_held(self, operation: ScalingOperation, error: EagleRayError) -> Steps:
        """Remove the engines that a failed operation has added. Raises `RolledBack` when they are gone."""
        held = list(self.held)
        yield from self._hand_over(operation, held, must_go=True)
        yield from self._leave_group(held)
        if self._rendezvous is not None and self._rendezvous.leaving:  # they stay, because the operation failed
            yield Regroup(tuple(self._rendezvous.ranks))
        for key in held:
            if key in self._replicas:
                yield Remove(key, "the operation that added it failed")
        self.held.clear()
        self._loaded.clear()
        self.failures.clear()
        yield self.until_gone(held)
        raise RolledBack(error)

    def _add_engines(self, operation: ScalingOperation, added: Collection[EngineId]) -> Steps:
        """Start engines, and wait until all of them are ready."""
        operation.phase = "preparing"
        if not added:
            return
        if (shortage := self._shortage(len(added))) is not None:
            raise InvalidRequest(shortage, param="num_engines")
        for key in added:
            self.held[key] = None
            yield StartReplica(key)
        seconds = self._start_seconds(added)
        operation.deadline = self._turn.now + seconds

        def check(holds: Callable[[], bool]) -> bool:
            for key in added:
                if error := self.failures.get(key):
                    raise error
            if self._is_late(operation):
                late = f"{_labels(self._unready(added))} did not start within {seconds:.0f} s"
                obstacle = self._regrouping_obstacle() if self._loaded.issuperset(added) else None
                raise DeadlineExceeded(late if obstacle is None else f"{late}: {obstacle}")
            return holds()

        def are_ready() -> bool:
            return not self._unready(added)

        if self._rendezvous is not None:
            yield from self._join_expert_group(operation, added, self._rendezvous, check)
        yield Until(lambda: check(are_ready), lambda: f"{_labels(self._unready(added))} must start")
        for key in added:
            self._loaded.discard(key)
        operation.deadline = None

    def _join_expert_group(
        self,
        operation: ScalingOperation,
        added: Collection[EngineId],
        group: ExpertRendezvous,
        check: Callable[[Callable[[], bool]], bool],
    ) -> Steps:
        """Have the expert group formed with engines that have loaded, again if one of them exits meanwhile. The former
        engines go on without it, with the experts that they had."""
        ranks = {key.rank for key in added}

        def unloaded() -> list[EngineId]:
            return [key for key in added if key.rank not in group.ranks and key not in self._loaded]

        def may_join() -> bool:
            return not unloaded() and self._regrouping_obstacle() is None

        def awaited() -> str:
            return f"{_labels(unloaded())} must start" if unloaded() else self._regrouping_obstacle() or ""

        def have_joined() -> bool:
            return not self._unready(added) or not ranks.issubset(group.ranks)

        while self._unready(added):
            yield Until(lambda: check(may_join), awaited)
            operation.phase = "committing"
            yield Regroup(tuple(sorted(ranks.union(group.ranks))))
            yield Until(lambda: check(have_joined), lambda: f"{_labels(added)} must get experts")

    def _hand_over(self, operation: ScalingOperation, engines: Collection[EngineId], *, must_go: bool = False) -> Steps:
        """Have the other engines of the expert group take over the experts of engines that leave. The rendezvous has
        the reason if they cannot. If it takes too long, engines that must go do so with their experts."""
        group = self._rendezvous
        if group is None:
            return

        def leaving() -> tuple[int, ...]:
            return tuple(key.rank for key in engines if key.rank in group.ranks)

        if not leaving():
            return
        labels, wait = _labels(engines), timeouts.REGROUP_WAIT_SECONDS
        operation.deadline = self._turn.now + wait

        def may_begin() -> bool:
            if (obstacle := self._regrouping_obstacle()) is None or not self._is_late(operation):
                return obstacle is None
            if not must_go:
                raise DeadlineExceeded(f"{labels} could not hand over experts for {wait:.0f} s: {obstacle}")
            return True

        yield Until(may_begin, lambda: self._regrouping_obstacle() or "")
        operation.deadline = None
        if self._regrouping_obstacle() is not None:
            return
        # One that has exited has no experts to give, and its replacement is not waited for.
        absent = [key.rank for key in engines if key not in self.held and not isinstance(self._replicas[key].state, Up)]
        staying = [rank for rank in group.ranks if rank not in absent]
        self.is_regrouping = True
        yield Regroup(tuple(staying), tuple(rank for rank in leaving() if rank in staying))
        seconds = self._start_seconds(engines)  # one of the others may be killed, and its replacement has to start
        operation.deadline = self._turn.now + seconds

        def have_moved() -> bool:
            if group.is_settled or not leaving():
                return True
            if self._is_late(operation) and not must_go:
                raise DeadlineExceeded(f"the experts of {labels} did not move to others within {seconds:.0f} s")
            return self._is_late(operation)

        yield Until(have_moved, lambda: f"the experts of {labels} must move to others")
        operation.deadline = None

    def _leave_group(self, engines: Collection[EngineId]) -> Steps:
        """Have the expert group formed without these engines. Experts that only they have are read by the others."""
        ranks = {key.rank for key in engines}
        if (group := self._rendezvous) is not None and ranks.intersection(group.ranks):
            yield Regroup(tuple(rank for rank in group.ranks if rank not in ranks))
        self.is_regrouping = False

    def drain(self, operation: ScalingOperation, engines: Collection[EngineId], seconds: float) -> Steps:
        """Have engines finish their requests, for at most `seconds`."""
        if seconds <= 0 or not engines:
            return
        operation.phase = "draining"
        operation.deadline = due = self._turn.now + seconds
        for key in engines:
            yield Drain(key)

        def have_finished() -> bool:
            busy = (client for key in engines for client in self.undrained.get(key, ()) if client in self.membership)
            return self._turn.now >= due or next(busy, None) is None

        yield Until(have_finished, lambda: f"{_labels(engines)} must finish requests")
        operation.deadline = None
        for key in engines:
            self.undrained.pop(key, None)

    def until_gone(self, keys: Collection[MemberId]) -> Until:
        def remaining() -> list[MemberId]:
            return [key for key in keys if key in self._replicas]

        def are_gone() -> bool:
            for key in remaining():
                if self._replicas[key].is_stuck:
                    raise EngineFailed(f"{key.label} has left, but its process still runs although it was killed")
            return not remaining()

        return Until(are_gone, lambda: f"{_labels(remaining())} must exit")

    def _until_up(self, operation: ScalingOperation, keys: Collection[MemberId]) -> Until:
        seconds = self._start_seconds(keys)
        operation.deadline = self._turn.now + seconds if keys else None

        def missing() -> list[MemberId]:
            return [key for key in keys if key in self._replicas and not self._replicas[key].is_settled]

        def are_up() -> bool:
            for key in keys:
                if key in self._replicas and self._replicas[key].expected is None:
                    raise EngineFailed(f"{key.label} was added and is given up: the log has the cause")
            if missing() and self._is_late(operation):
                raise DeadlineExceeded(f"{_labels(missing())} did not start within {seconds:.0f} s")
            return not missing()

        return Until(are_up, lambda: f"{_labels(missing())} must start")

    def _start_seconds(self, keys: Collection[MemberId]) -> float:
        """Return the time that members have to start."""
        longest = max((self._replicas[key].start_seconds for key in keys if key in self._replicas), default=0.0)
        return timeouts.SCALE_START_ATTEMPTS * longest

    def _is_late(self, operation: ScalingOperation) -> bool:
        """Whether the operation may not wait longer for what it waits for."""
        return operation.deadline is not None and self._turn.now >= operation.deadline

    def _unready(self, engines: Collection[EngineId]) -> list[EngineId]:
        return [key for key in engines if self.held.get(key) is None]

    # The engines and API servers that a request changes.

    @property
    def ranks(self) -> list[int]:
        """Ranks of the engines that run or come back."""
        members = (replica.expected for key, replica in self._replicas.items() if key not in self.held)
        return sorted(member.rank for member in members if isinstance(member, EngineId))

    @property
    def num_api_servers(self) -> int:
        return len(self._api_server_indices)

    @property
    def _api_server_indices(self) -> list[int]:
        """Indices of the API servers that run or come back."""
        members = (replica.expected for replica in self._replicas.values())
        return sorted(member.index for member in members if isinstance(member, ClientId))

    def free_engine(self) -> EngineId:
        """Return the lowest key of an engine that no engine has had or may get back."""
        return next(key for rank in itertools.count() if (key := EngineId(self._instance, rank)) not in self._replicas)

    def _engine_changes(self, request: Scale) -> tuple[list[EngineId], list[EngineId]]:
        """Return the engines to add and to remove. An engine that was given up is started again rather than another."""
        ranks, named = self.ranks, set(request.remove_ranks)
        if unknown := sorted(named.difference(ranks)):
            raise InvalidRequest(f"there is no engine {unknown[0]}: the ranks are {ranks}", param="remove_ranks")
        target = len(ranks) - len(named) if request.num_engines is None else request.num_engines
        if target < 1:
            raise InvalidRequest(f"{target} engines were asked for: at least one must stay", param="num_engines")
        stay = [rank for rank in ranks if rank not in named]
        added = list(itertools.islice(self._free_keys(EngineId), max(0, target - len(stay))))
        return added, [EngineId(self._instance, rank) for rank in sorted(named.union(stay[target:]))]

    def adds_engines(self, request: Scale) -> bool:
        """Whether a request adds engines. Raises `InvalidRequest` as `check` does."""
        return bool(self._engine_changes(request)[0])

    def _free_keys(self, kind: Callable[[str, int], Key]) -> Iterator[Key]:
        """Return the keys without a replica and those whose replica was given up, except while its process exits."""
        for number in itertools.count():
            replica = self._replicas.get(key := kind(self._instance, number))
            if replica is None or replica.is_gone:
                yield key

    def _api_server_changes(self, target: int | None) -> tuple[list[ClientId], list[ClientId]]:
        indices = self._api_server_indices
        if target is None:
            return [], []
        added = list(itertools.islice(self._free_keys(ClientId), max(0, target - len(indices))))
        return added, [ClientId(self._instance, index) for index in indices[target:]]

    def check(self, request: Scale | RestartEngines) -> None:
        """Raise `InvalidRequest` for a request that can never be executed."""
        if isinstance(request, RestartEngines):
            if unknown := sorted(set(request.ranks).difference(self.ranks)):
                raise InvalidRequest(f"there is no engine {unknown[0]}: the ranks are {self.ranks}", param="ranks")
            return
        self._engine_changes(request)
        if request.num_api_servers is not None:
            if not self.num_api_servers:
                raise InvalidRequest("this instance has no API servers to scale", param="num_api_servers")
            if request.num_api_servers < 1:
                raise InvalidRequest(
                    f"{request.num_api_servers} API servers were asked for: at least one must stay",
                    param="num_api_servers",
                )


def _labels(members: Collection[MemberId]) -> str:
    return ", ".join(member.label for member in members)
