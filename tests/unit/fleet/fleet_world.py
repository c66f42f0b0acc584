"""A fleet whose processes, clients and clock are simulated, and which checks every action of the state machine.

`settle` is a fair environment: processes that were told to exit exit, those that start come up, members reply. Whatever
the fleet has begun must end in it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fleet_machine import INFO, OBSERVER, Machine

from eagleray.errors import ConfigError, ProcessCrashed
from eagleray.fleet.events import Adopt, Event, Exited, NotConnected, Silent, StopInstance, TimePassed
from eagleray.fleet.external_clients import is_external
from eagleray.fleet.replica import Up
from eagleray.fleet.turn import Action, Connect, Disconnect, FailInstance, Send, Spawn
from eagleray.identity import ClientId, EngineId, MemberId, replica_key
from eagleray.messages.checkpoints import CheckpointFetched, FetchCheckpoint
from eagleray.messages.control import Command, CommandDone, ControlCall, ControlReturned, FetchWeights
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import (
    Bound,
    ClientStarted,
    EngineLoaded,
    EngineStarted,
    ExpertsBroken,
    ExpertsFormed,
    ExpertsJoined,
    ExpertsOpened,
    Knows,
    OpenExperts,
    Register,
    Stop,
)
from eagleray.messages.membership import Joined, Left
from eagleray.messages.plain import unpack
from eagleray.messages.scaling import Drained, Draining, Scale
from eagleray.messages.workers import EngineOpened, GroupOpened, Topology

SINGLE_WORKER = Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=["here"], addresses=["127.0.0.1"])

CAUSES = {
    "signal": Failure.noticed("it was killed by SIGKILL"),
    "crash": Failure.of(ProcessCrashed("it was killed by SIGSEGV")),
    "bug": Failure.of(ZeroDivisionError("there is a bug")),
    "other bug": Failure.of(KeyError("there is another bug")),
    "user error": Failure.of(ConfigError("the cache is too small")),
}


REPEATABLE = (
    Bound
    | EngineStarted
    | ClientStarted
    | Knows
    | Ended
    | Drained
    | CheckpointFetched
    | CommandDone
    | EngineLoaded
    | ExpertsOpened
    | ExpertsJoined
    | ExpertsBroken
)
"""Messages that may arrive again."""


class World(Machine):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: dict[MemberId, dict[MemberId, MemberId]] = {}
        """What each attached member was told: the present members by replica key."""
        self.gone: dict[MemberId, dict[MemberId, Left]] = {}
        """The members of which each attached member was told that they have left."""
        self.returning: dict[MemberId, set[MemberId]] = {}
        """Replica keys of the engines that each attached member expects to return."""
        self.hidden: set[MemberId] = set()
        """Engines that were spawned for a scaling operation and have not joined."""
        self.calls: dict[tuple[ClientId, int], float] = {}
        """Deadlines of the calls that have not been answered."""
        self.answers: dict[int, ControlReturned] = {}
        self.commands: defaultdict[MemberId, list[Command]] = defaultdict(list)
        """Commands that members have not executed."""
        self.draining: defaultdict[MemberId, list[EngineId]] = defaultdict(list)
        self.fetching: defaultdict[MemberId, list[FetchCheckpoint]] = defaultdict(list)
        self.updates: dict[MemberId, int] = {}
        """Numbers of the updates whose weights engines have."""
        self.bound: set[MemberId] = set()
        self.started: set[MemberId] = set()
        self.loaded: set[MemberId] = set()
        """Engines of an expert group that have loaded their models."""
        self.group_messages: dict[MemberId, OpenExperts | ExpertsFormed] = {}
        """The newest message about the expert group to each engine."""
        self.opened_epochs: defaultdict[MemberId, int] = defaultdict(int)
        self.joined_epochs: defaultdict[MemberId, int] = defaultdict(int)
        self.told_to_stop: set[MemberId] = set()
        self.failing: set[MemberId] = set()
        """Processes that have reported a failure and exit by themselves."""
        self.hung: set[MemberId] = set()
        self.confirmed: set[tuple[MemberId, MemberId]] = set()
        self.messages: list[Event] = []
        """Messages that may arrive again."""
        self.last_scale: tuple[str, Scale] | None = None
        """The newest accepted request to scale, with the id of its operation."""
        self.is_closed = False
        self._event: Event | None = None

    # Checks.

    def handle(self, event: Event) -> list[Action]:
        self._event = event
        self.is_closed = self.is_closed or isinstance(event, StopInstance)
        if isinstance(event, REPEATABLE):
            self.messages.append(event)
        actions = super().handle(event)
        self._check()
        return actions

    def _check(self) -> None:
        joined = self.state._membership._joined
        for member, known in self.known.items():
            is_client = isinstance(member, ClientId)
            told_of = [other for other in joined if is_client or isinstance(other, ClientId)]
            present = {replica_key(other): other for other in told_of if other != member}
            assert known == present, f"{member.label} knows {known.values()}, but there are {present.values()}"
        for held in self.state._changes.held:
            assert not any(held in known for known in self.known.values()), f"{held.label} is held back"
        assert self.state._membership._addresses.keys() == self.attached.keys()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Spawn(member):
                assert not self.error and not self.is_closed
                older = [other for other in self.spawned if replica_key(other) == replica_key(member)]
                assert all(other.incarnation < member.incarnation for other in older)
                if isinstance(member, EngineId):
                    self.updates[member] = self.state.engine_options(member).update
                if replica_key(member) in self.state._changes.held:
                    self.hidden.add(member)
            case Connect(member, _, attach):
                self.known[member] = {replica_key(joined.member): joined.member for joined in attach.members}
                self.returning[member] = {replica_key(left.member) for left in attach.missing if left.returns} - {
                    replica_key(member)
                }
                self.gone[member] = {}
            case Disconnect(member):
                for facts in (self.known, self.returning, self.gone, self.commands, self.draining, self.fetching):
                    facts.pop(member, None)
                self.calls = {call: due for call, due in self.calls.items() if call[0] != member}
            case Send(receivers, message):
                for receiver in receivers:
                    assert receiver in self.attached, f"{message} is sent to {receiver.label}, which has left"
                    self._receive(receiver, message)
            case FailInstance():
                self._check_end()
        super()._carry_out(action)

    def _receive(self, receiver: MemberId, message: object) -> None:
        match message:
            case Joined(member):
                self.hidden.discard(member)
                assert member not in self.gone[receiver], f"{member.label} joins after it has left"
                assert replica_key(member) not in self.known[receiver], f"{member.label} joins twice"
                self.known[receiver][replica_key(member)] = member
                self.returning[receiver].discard(replica_key(member))
            case Left(member):
                assert member not in self.hidden, f"{member.label} was unknown to {receiver.label}"
                former = self.gone[receiver].get(member)
                assert former is None or (former.returns and not message.returns), f"{member.label} leaves twice"
                self.gone[receiver][member] = message
                if self.known[receiver].get(replica_key(member)) == member:
                    del self.known[receiver][replica_key(member)]
                self.returning[receiver].discard(replica_key(member))
                if message.returns and isinstance(member, EngineId):
                    self.returning[receiver].add(replica_key(member))
            case ControlReturned(call_id=call_id):
                assert (receiver, call_id) in self.calls, "a call is answered again"
                del self.calls[receiver, call_id]
                self.answers[call_id] = message
            case Command():
                self.commands[receiver].append(message)
            case OpenExperts(epoch, ranks) | ExpertsFormed(epoch, [*_], [*ranks]):
                assert isinstance(receiver, EngineId)
                members = [member if isinstance(member, int) else member.rank for member in ranks]
                assert receiver.rank in members, f"{receiver.label} belongs to no group of {members}"
                former = self.group_messages.get(receiver)
                assert former is None or former.epoch <= epoch
                self.group_messages[receiver] = message
            case Draining(engine):
                self.draining[receiver].append(engine)
            case FetchCheckpoint():
                assert not is_external(receiver)
                self.fetching[receiver].append(message)
            case Stop():
                self.told_to_stop.add(receiver)

    def _check_end(self) -> None:
        """Check that the instance fails only because nothing of a kind is left, or because it cannot start."""
        assert isinstance(self._event, Exited | Ended | TimePassed | Silent | CommandDone), self._event
        if self.is_serving and not self.shares_experts:
            replicas = self.state._replicas
            expected = {type(key) for key in replicas.expected() if key not in self.state._changes.held}
            assert not {EngineId, *([ClientId] if self.config.serving.api_server_count else [])} <= expected
        elif isinstance(self._event, Exited | Ended):
            assert self._event.cause.kind or self.config.recovery.max_engine_restarts == 0

    # What processes and clients do.

    def bring_up(self, member: MemberId) -> None:
        super().bring_up(member)
        while any(self.advance(engine) for engine in list(self.attached)):
            pass
        self.confirm()

    def adopt(self) -> None:
        self.handle(Adopt(OBSERVER, "of observer"))
        self.start(OBSERVER)

    @property
    def clients(self) -> list[ClientId]:
        return [member for member in self.attached if isinstance(member, ClientId)]

    def bind(self, member: MemberId) -> None:
        if member not in self.bound:
            self.bound.add(member)
            super().bind(member)

    def start(self, member: MemberId) -> None:
        if member in self.attached and member not in self.started:
            if self.shares_experts and isinstance(member, EngineId):
                self.advance(member)
                return
            self.started.add(member)
            is_engine = isinstance(member, EngineId)
            self.handle(EngineStarted(member, INFO, self.updates[member]) if is_engine else ClientStarted(member))

    @property
    def shares_experts(self) -> bool:
        return self.config.parallel.enable_expert_parallel

    def advance(self, engine: MemberId) -> bool:
        """Have an engine of an expert group do its next step: load, open or join. Returns whether there was one."""
        if not self.shares_experts or not isinstance(engine, EngineId) or engine in self.hung:
            return False
        message = self.group_messages.get(engine)
        if engine not in self.loaded:
            self.loaded.add(engine)
            self.handle(EngineLoaded(engine))
        elif isinstance(message, OpenExperts) and message.epoch > self.opened_epochs[engine]:
            self.opened_epochs[engine] = message.epoch
            opened = EngineOpened(rank=engine.rank, topology=SINGLE_WORKER, opened=[GroupOpened()])
            self.handle(ExpertsOpened(engine, message.epoch, opened))
        elif isinstance(message, ExpertsFormed) and message.epoch > self.joined_epochs[engine]:
            assert message.epoch == self.opened_epochs[engine], f"{engine.label} has not opened for this epoch"
            self.joined_epochs[engine] = message.epoch
            self.handle(ExpertsJoined(engine, message.epoch))
            if engine not in self.started and engine in self.attached:
                self.started.add(engine)
                self.handle(EngineStarted(engine, INFO))
        else:
            return False
        return True

    def find_broken(self, engine: MemberId) -> None:
        """Have an engine report that its expert group is broken."""
        epoch = self.joined_epochs[engine]
        if isinstance(engine, EngineId) and epoch > 0:
            self.handle(ExpertsBroken(engine, epoch))

    def confirm(self) -> None:
        """Have every client confirm the engines that it knows."""
        for client in self.clients:
            for engine in list(self.known.get(client, {}).values()):
                if isinstance(engine, EngineId) and (client, engine) not in self.confirmed:
                    self.confirmed.add((client, engine))
                    self.handle(Knows(client, engine))

    def end(self, member: MemberId, cause: Failure) -> None:
        del self.running[member]
        self.handle(Exited(member, cause))

    def report_failure(self, member: MemberId, cause: Failure) -> None:
        self.failing.add(member)
        self.handle(Ended(member, cause))

    def register(self, address: str, lease: float, *, is_reachable: bool = True) -> None:
        actions = self.handle(Register(address, lease))
        for action in actions:
            if isinstance(action, Connect) and not is_reachable:
                # The runtime has no connection, and reports that at once.
                for facts in (self.attached, self.known, self.returning, self.gone):
                    facts.pop(action.member)
                self.handle(NotConnected(action.member, "there is no such address"))

    def execute_next(self, member: MemberId, failure: Failure | None = None) -> None:
        """Have a member execute its next command."""
        command = self.commands[member].pop(0)
        if isinstance(command.body, FetchWeights) and failure is None:
            self.updates[member] = command.body.update
        update = self.updates.get(member, 0)
        result = {"update": update, "handles": [], "is_collective": False, "success": True}
        self.handle(CommandDone(member=member, number=command.number, result=result, failure=failure))

    @property
    def operation_ids(self) -> set[str]:
        """Ids of the scaling operations that were accepted."""
        scaling = self.state._scaling
        return {*scaling._past, *(operation.operation_id for operation in scaling._operations)}

    def send_call(self, client: ClientId, request: Any, operation_id: str | None, timeout: float) -> int:
        self._num_calls += 1
        number = self._num_calls
        operation_id = operation_id or f"op-{number}"
        self.calls[client, number] = self.now + timeout
        former = self.operation_ids
        self.handle(
            ControlCall(client=client, call_id=number, operation_id=operation_id, request=request, timeout=timeout)
        )
        if isinstance(request, Scale) and operation_id in self.operation_ids - former:
            self.last_scale = operation_id, request
        return number

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(10_000):
            if (deadline := self.state.deadline) is None or deadline > end:
                break
            self.now = max(self.now, deadline)
            self.handle(TimePassed())
        else:
            raise AssertionError("a timer is due again and again")
        self.now = end
        late = [call for call, due in self.calls.items() if due < self.now and call[0] in self.attached]
        assert not late, f"calls {late} were not answered by their deadlines"

    # A fair environment.

    def settle(self) -> None:
        """Let everything take its course, until nothing waits for a time."""
        for _ in range(3000):
            if self._do_something():
                continue
            if (deadline := self.state.deadline) is None:
                return
            self.pass_time(max(0.0, deadline - self.now))
        raise AssertionError(f"it never settles: {self.state._turn.timers._due}")

    def _do_something(self) -> bool:
        """Have processes and clients do what they have to. Returns whether there was something."""
        for member, signals in list(self.running.items()):
            if "kill" in signals or member in self.failing:
                self.end(member, CAUSES["signal"])
            elif member in self.hung:
                if member in self.attached and member in self.started | self.loaded:
                    self.handle(Silent(member, 10.0))
                    return bool(self.running[member])
                continue
            elif signals or member in self.told_to_stop:
                self.end(member, Failure.noticed("it ended with exit code 0"))
            elif member not in self.bound:
                self.bind(member)
            else:
                continue
            return True
        for member in list(self.attached):
            if self.advance(member):
                return True
            is_engine = self.shares_experts and isinstance(member, EngineId)
            if member not in self.started and member not in self.hung and not is_engine:
                self.start(member)
                return True
            if self.commands.get(member):
                self.execute_next(member)
                return True
            if isinstance(member, ClientId) and self.draining.get(member):
                self.handle(Drained(member, self.draining[member].pop()))
                return True
            if isinstance(member, ClientId) and self.fetching.get(member):
                asked = self.fetching[member].pop()
                self.handle(CheckpointFetched(member, asked.operation_id, options=asked.options))
                return True
            if is_external(member) and member in self.told_to_stop:
                return False
        num_confirmed = len(self.confirmed)
        self.confirm()
        return len(self.confirmed) > num_confirmed

    def check_settled(self) -> None:
        """Check a fleet that has settled and neither stops nor has failed."""
        assert self.state.deadline is None
        assert not self.calls, f"calls {list(self.calls)} were never answered"
        assert self.is_serving
        replicas = self.state._replicas
        assert all(isinstance(replica.state, Up) or replica.is_gone for replica in replicas.values()), self.states()
        assert self.running.keys() == {replica.member for replica in replicas.values() if not replica.is_gone}
        assert not any(self.returning.values()), f"members expect {self.returning}, but these are up: {self.states()}"
        ranks = self.up_ranks()
        if (experts := self.state._experts) is not None:
            group = experts._rendezvous
            assert (group.ranks, group.leaving, group.is_settled) == (ranks, [], True)
            assert {self.joined_epochs[engine] for engine in group.engines} == {group.epoch}
            assert not self.state._control._is_regrouping
        assert ranks == sorted(engine.rank for engine in self.state.engines)
        steered = self.state._control._instance
        vacant = {key.rank for key in replicas if isinstance(key, EngineId) and replicas[key].is_gone}
        assert set(ranks) <= set(steered.ranks) <= vacant.union(ranks), (steered.ranks, ranks)
        assert {record.engine.rank for record in steered.started} == set(ranks)
        assert steered.num_workers == len(steered.ranks) * steered.workers_per_engine
        current = self.state._scaling._current
        assert current is None, current
        options = self.state._options
        assert options.rollout is None and options.surge is None
        for key, replica in replicas.items():
            if isinstance(replica.member, EngineId) and isinstance(replica.state, Up):
                assert options.of(key) is options.settled, f"{replica.member.label} has other options"
                assert self.updates[replica.member] == self.state._control.state.update
        assert not self.state._changes.held and not self.state._changes.undrained and not self.state._replicas._leaving

    @property
    def has_given_up(self) -> bool:
        """Whether an engine or an API server was given up."""
        return any(replica.is_gone for replica in self.state._replicas.values())

    def up_ranks(self) -> list[int]:
        return sorted(
            key.rank
            for key, replica in self.state._replicas.items()
            if isinstance(key, EngineId) and isinstance(replica.state, Up)
        )

    def states(self) -> dict[str, object]:
        return {replica.member.label: replica.state for replica in self.state._replicas.values()}

    def outcome(self, call_id: int) -> dict[str, Any] | Failure:
        answer = self.answers[call_id]
        return answer.failure or unpack(answer.answer)
