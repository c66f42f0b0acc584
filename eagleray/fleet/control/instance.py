"""The state of an instance and of its engines, and the commands that change them.

Pure: commands, joins and published states are collected as effects. Owned by `Control`; operations change it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from eagleray.errors import TransferBroken
from eagleray.fleet import timeouts
from eagleray.identity import ClientId, EngineId, MemberId
from eagleray.messages.adapters import Adapter
from eagleray.messages.control import (
    AbortWeightUpdate,
    CloseWeightTransfer,
    Command,
    CommandBody,
    ControlReturned,
    InstanceState,
    OpenWeightTransfer,
    SetState,
)
from eagleray.messages.failure import Failure


class SendCommand(NamedTuple):
    member: MemberId
    command: Command


class SendAnswer(NamedTuple):
    client: ClientId
    answer: ControlReturned


class PublishState(NamedTuple):
    state: InstanceState


class JoinEngine(NamedTuple):
    """The engine has the instance's state and weights: clients may send it requests."""

    engine: EngineId


class ReplaceEngine(NamedTuple):
    engine: EngineId
    cause: str


Effect = SendCommand | SendAnswer | PublishState | JoinEngine | ReplaceEngine


@dataclass
class EngineRecord:
    """An attached engine."""

    engine: EngineId
    sent: InstanceState
    """The newest state that was sent to the engine."""
    is_started: bool = False
    has_joined: bool = False
    update: int | None = 0
    """Number of the update whose weights the engine has; None if its weights are empty or a mixture."""
    takes_part: bool = False
    """Whether the engine has all tensors that the open update has received."""
    unanswered: dict[int, SetState | AbortWeightUpdate] = field(default_factory=dict)
    """Commands without a reply whose failure may have the engine replaced, by number."""
    refusal: Failure | None = None
    """Reason why the engine could not adopt the state `sent`, while an operation awaits other engines."""
    due: float | None = None
    """Time by which the engine must have adopted the state, before it joins."""


@dataclass
class WeightTransfer:
    """A prepared transfer of weights from a trainer."""

    init_info: dict[str, Any]
    is_collective: bool
    """Whether the transfer breaks when an engine exits."""
    broken: str | None = None
    """Cause, if the transfer has broken."""


class SteeredInstance:
    """State, engines and clients of an instance.

    `ranks`: data-parallel ranks of its engines. `workers_per_engine`: tensor-parallel times pipeline-parallel size.
    `num_workers`: workers of the whole deployment. `shares_experts`: whether the engines step together. `adapters`:
    directories of the adapters that are loaded at the start, by name. `max_adapters`: most adapters at a time.
    `model_names`: names of the model, which no adapter may have. `updates_in_place`: whether updates overwrite the
    weights before their commit.
    """

    def __init__(
        self,
        name: str,
        *,
        ranks: Sequence[int],
        workers_per_engine: int,
        num_workers: int,
        shares_experts: bool,
        updates_in_place: bool = False,
        adapters: Mapping[str, str] | None = None,
        max_adapters: int = 0,
        model_names: Collection[str] = (),
    ) -> None:
        self.name = name
        self.ranks = list(ranks)
        """Data-parallel ranks of the engines. After scaling there may be gaps."""
        self._start_rank = ranks[0]
        self.workers_per_engine = workers_per_engine
        self.num_workers = num_workers
        self.shares_experts = shares_experts
        self.updates_in_place = updates_in_place
        self.now = 0.0
        """Time of the event that is being handled, in seconds of a monotonic clock."""
        self.max_adapters = max_adapters
        self.model_names = model_names
        self._adapter_numbers = itertools.count(1)
        self.state = InstanceState(
            adapters=tuple(
                Adapter(name=name, number=self.next_adapter_number(), path=path)
                for name, path in (adapters or {}).items()
            )
        )
        self.since = {"pause": 0.0, "sleep": 0.0, "update": 0.0}
        """Times at which the pause, the sleep and the open update began."""
        self.engines: dict[EngineId, EngineRecord] = {}
        self.clients: set[ClientId] = set()
        """The instance's own clients."""
        self.absent: dict[int, tuple[str, bool]] = {}
        """Engines that have not started again, by rank: cause of the exit, and whether a replacement follows."""
        self.transfer: WeightTransfer | None = None
        self.weights_kept_because: str | None = None
        """Why no weight update may begin now; None if one may."""
        self.labels: dict[int | None, str] = {0: InstanceState().weight_version}
        """Names of the weights of the committed updates, by number."""
        self._last_update = 0
        """The highest number that an update has had, also that of a checkpoint whose change was undone."""
        self.effects: list[Effect] = []
        self._numbers = itertools.count(1)

    # Engines.

    @property
    def started(self) -> list[EngineRecord]:
        """Engines that execute commands, by rank."""
        return sorted((record for record in self.engines.values() if record.is_started), key=lambda it: it.engine.rank)

    @property
    def steered(self) -> list[EngineRecord]:
        """Engines that a call waits for. An engine that has not joined has no requests, and may be copying weights for
        minutes, so it is awaited only if it takes part in an update, steps with others because they share experts, or
        has to free or allocate memory."""
        return [
            record
            for record in self.started
            if record.has_joined
            or record.takes_part
            or self.shares_experts
            or (record.sent.asleep, record.sent.sleep_level) != (self.state.asleep, self.state.sleep_level)
        ]

    @property
    def participants(self) -> list[EngineRecord]:
        """Engines that take part in the open update."""
        return [record for record in self.started if record.takes_part]

    @property
    def lacks_participants(self) -> bool:
        """Whether too few engines take part in the open update for a commit: none, or not all that share experts. No
        other engine has the experts of one that is missing, so its successor could not get them."""
        return len(self.participants) < (len(self.ranks) if self.shares_experts else 1)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks without an engine that executes commands."""
        return sorted(set(self.ranks) - {record.engine.rank for record in self.started})

    @property
    def lacks_engines(self) -> bool:
        """Whether a rank has no engine and will get none."""
        return any(rank in self.absent and not self.absent[rank][1] for rank in self.missing_ranks)

    def describe_missing(self) -> str:
        """Describe the missing engines, with the causes."""
        causes = {rank: self.absent.get(rank, ("it is still starting", True))[0] for rank in self.missing_ranks}
        return "; ".join(f"engine {rank} is missing: {cause}" for rank, cause in causes.items()) or "no engine"

    def set_ranks(self, ranks: Iterable[int]) -> None:
        """Record that the instance has engines of these ranks from now on."""
        former, self.ranks = len(self.ranks), sorted(ranks)
        self.num_workers += (len(self.ranks) - former) * self.workers_per_engine
        self.absent = {rank: absence for rank, absence in self.absent.items() if rank in self.ranks}

    def first_rank(self, engine: EngineId) -> int:
        """Return the rank of the engine's first worker among all workers."""
        return (self._start_rank + self.ranks.index(engine.rank)) * self.workers_per_engine

    def review(self) -> None:
        """Let engines that are up to date join, and bring the others up to date."""
        for record in self.started:
            if record.has_joined:
                continue
            if record.sent != self.state:
                if self.shares_experts and record.sent.may_step:
                    self._send_state(record, SetState(state=msgspec.structs.replace(record.sent, is_held=True)))
                self._send_state(record, SetState(state=self.state))
                record.due = self.now + timeouts.STATE_TIMEOUT_SECONDS
            elif not record.unanswered:
                record.due = None
                if not self.must_wait(record):
                    record.has_joined = True
                    self.effects.append(JoinEngine(record.engine))

    def review_weights(self) -> None:
        """Update `InstanceState.lacks_weights`: no engine may step if none has usable weights. Engines that share
        experts may not step either if one is missing or has other weights, because a step would mix weights. Before the
        first update a missing one does not matter, because every engine starts with the weights of the checkpoint."""
        is_dropped = "weights" in self.state.asleep
        have_none = [record.update is None and not is_dropped for record in self.started]
        if self.shares_experts:
            is_incomplete = self.state.update > 0 and bool(self.missing_ranks)
            have_others = (not record.has_joined and record.update != self.state.update for record in self.started)
            lacks_weights = is_incomplete or any(have_none) or any(have_others)
        else:
            lacks_weights = bool(have_none) and all(have_none)
        if lacks_weights != self.state.lacks_weights:
            self.assign(self.changed(lacks_weights=lacks_weights))
            self.post_state()

    def must_wait(self, record: EngineRecord) -> bool:
        """Whether an engine must not join now: its weights are not the required ones, or they would not be after the
        commit of the open update, in which it does not take part."""
        will_be_behind = self.state.open_update is not None and bool(self.participants) and not record.takes_part
        return record.update != self.state.update or will_be_behind

    # State.

    def changed(self, **changes: Any) -> InstanceState:
        """Return the state with these changes."""
        return msgspec.structs.replace(self.state, **changes)

    def assign(self, state: InstanceState) -> None:
        """Change the state and publish it to clients. `set_state_bodies` or `post_state` send it to engines."""
        before, self.state = self.state, state
        if before == state:
            return
        for latch, was, is_now in (
            ("pause", before.pause, self.state.pause),
            ("sleep", before.asleep, self.state.asleep),
            ("update", before.open_update, self.state.open_update),
        ):
            if is_now and not was:
                self.since[latch] = self.now
        self._last_update = max(self._last_update, self.state.update)
        self.labels[self.state.update] = self.state.weight_version
        self.effects.append(PublishState(self.state))

    @property
    def next_update(self) -> int:
        """The number of the next weight update. None is used twice, because the versions of answers, the prefix caches
        and the copies of weights name weights by it."""
        return self._last_update + 1

    def set_state_bodies(self, **fields: Any) -> dict[MemberId, CommandBody]:
        """Return the command to adopt the state for the engines that a call waits for. `fields`: others of `SetState`.
        `review` sends the state to the others."""
        return {record.engine: SetState(state=self.state, **fields) for record in self.steered}

    def post_state(self) -> None:
        """Send the state to every engine without awaiting the replies. An engine that cannot adopt it is replaced."""
        for record in self.started:
            self._send_state(record, SetState(state=self.state))

    def drop_update(self) -> None:
        """Close the open update without a commit, everywhere."""
        self.post(AbortWeightUpdate())
        for record in self.engines.values():
            record.takes_part = False
        self.assign(self.changed(open_update=None, is_in_place=False, is_held=False))
        self.post_state()

    def close_transfer(self, cause: str) -> None:
        """Close the transfer on every engine, because it broke."""
        if self.transfer is not None and self.transfer.broken is None:
            self.transfer.broken = cause
            self.post(CloseWeightTransfer())

    def check_transfer(self) -> None:
        """Raise `TransferBroken` if the transfer broke."""
        if self.transfer is not None and self.transfer.broken is not None:
            raise TransferBroken(
                f"the transfer of weights broke: {self.transfer.broken}; the old weights stay: call "
                "init_weight_transfer_engine again, then start the update again"
            )

    def next_adapter_number(self) -> int:
        """Return the number of the next load of an adapter."""
        return next(self._adapter_numbers)

    # Commands.

    def post(self, body: CommandBody, engines: Iterable[EngineId] | None = None) -> None:
        """Send a command to engines, all of them by default, without awaiting the replies."""
        for engine in [record.engine for record in self.started] if engines is None else engines:
            self.send(engine, body, timeouts.STATE_TIMEOUT_SECONDS)

    def send(self, member: MemberId, body: CommandBody, timeout: float) -> int:
        """Send a command. Returns its number."""
        if isinstance(body, SetState) and isinstance(member, EngineId):
            return self._send_state(self.engines[member], body, timeout + timeouts.STATE_TIMEOUT_SECONDS)
        number = next(self._numbers)
        if isinstance(body, AbortWeightUpdate) and isinstance(member, EngineId):
            self.engines[member].unanswered[number] = body
        self.effects.append(SendCommand(member, Command(number=number, body=body, timeout=timeout)))
        return number

    def _send_state(self, record: EngineRecord, body: SetState, timeout: float = timeouts.STATE_TIMEOUT_SECONDS) -> int:
        number = next(self._numbers)
        record.sent, record.refusal = body.state, None
        record.unanswered[number] = body
        self.effects.append(SendCommand(record.engine, Command(number=number, body=body, timeout=timeout)))
        return number

    def replace(self, engine: EngineId, cause: str) -> None:
        """Have the engine replaced, and remove it at once."""
        self.engines.pop(engine, None)
        self.absent[engine.rank] = cause, True
        self.effects.append(ReplaceEngine(engine, cause))

    def open_transfer_on(self, engine: EngineId) -> None:
        """Prepare the transfer on an engine that started after it was prepared on the others."""
        if self.transfer is not None and not self.transfer.is_collective:
            body = OpenWeightTransfer(init_info=self.transfer.init_info, first_rank=self.first_rank(engine))
            self.post(body, [engine])


class MemberFailed(Exception):
    """A member could not execute a command. Ends the operation with this failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
