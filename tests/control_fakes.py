"""Engines and clients in memory around the state machine of an instance. The test decides when each does its next step.

An engine executes its commands in their order, as a real one does: it stages, checks and applies numbered updates. A
pause of mode `wait` is answered when the test lets the requests end, or when a later state arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from eagleray.fleet.control.instance import (
    JoinEngine,
    PublishState,
    ReplaceEngine,
    SendAnswer,
    SendCommand,
    SteeredInstance,
)
from eagleray.fleet.control.machine import Control
from eagleray.identity import ClientId, EngineId, next_incarnation
from eagleray.messages.control import (
    AbortRequests,
    AbortWeightUpdate,
    CheckWeights,
    CloseWeightTransfer,
    Command,
    CommandDone,
    ControlCall,
    ControlReturned,
    DropAdapter,
    FetchWeights,
    InstanceState,
    OpenWeightTransfer,
    ReceiveWeights,
    ResetPrefixCache,
    ServeWeights,
    SetState,
    StageAdapter,
)
from eagleray.messages.failure import Failure
from eagleray.messages.plain import unpack

SECONDS = 100.0
"""Timeout of a call whose test says nothing else."""


@dataclass
class SteeredEngine:
    engine: EngineId
    state: InstanceState
    shares_experts: bool = False
    update: int | None = 0
    """Number of the update whose weights it has; None if they were dropped."""
    staged: int | None = None
    """Number of the update that it has staged tensors of."""
    has_transfer: bool = False
    has_joined: bool = False
    is_started: bool = False
    has_running: bool = False
    """Whether requests run that a pause of mode `wait` waits for."""
    inbox: list[Command] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)
    """Numbers of the adapters that it has."""
    digest: str = "d"
    """Hash of the files of every adapter, as this engine reads them."""
    waiting: Command | None = None
    received: list[object] = field(default_factory=list)
    """Bodies of the commands that it has executed."""

    @property
    def may_step(self) -> bool:
        return self.has_joined and self.state.may_step and self.update is not None

    def execute(self, command: Command) -> list[CommandDone]:
        """Execute a command. Returns the replies that it leads to: none if it waits."""
        self.received.append(command.body)
        replies = []
        match command.body:
            case SetState(state=state):
                if self.waiting is not None:
                    replies.append(self.reply(self.waiting))
                    self.waiting = None
                if self.shares_experts and self.state.may_step:
                    is_applied = self.staged is not None and self.staged == state.update
                    assert not is_applied, "others may be in a step"
                    assert state.asleep == self.state.asleep, "others may be in a step"
                self.state = state
                if "weights" in state.asleep and state.sleep_level == 2:
                    self.update = None
                self.adapters = [adapter.number for adapter in state.adapters]
                if self.staged is not None and self.staged == state.update:
                    self.update, self.staged = state.update, None
                if state.pause == "wait" and self.has_running:
                    self.waiting = command
                    return replies
                return [*replies, self.reply(command)]
            case ReceiveWeights():
                assert self.state.open_update is not None, "tensors came without an update"
                self.staged = self.state.open_update
                return [self.reply(command, num_tensors=2, num_bytes=8)]
            case CheckWeights():
                assert self.state.open_update is not None, "there is no update to check"
                return [self.reply(command, missing=["a", "b"], num_missing=2)]
            case AbortWeightUpdate():
                self.staged = None
            case OpenWeightTransfer():
                self.has_transfer = True
            case CloseWeightTransfer():
                self.has_transfer = False
            case ResetPrefixCache():
                return [self.reply(command, success=True)]
            case ServeWeights(update=update):
                assert self.update == update, "only weights that it has are asked for"
                return [self.reply(command, handles=[b"weights"])]
            case FetchWeights(update=update):
                assert not self.may_step, "weights change under a step"
                self.update = update
                return [self.reply(command, update=update)]
            case StageAdapter(adapter):
                self.adapters.append(adapter.number)
                return [self.reply(command, digest=self.digest)]
            case DropAdapter(number):
                self.adapters = [other for other in self.adapters if other != number]
            case other:
                raise AssertionError(f"engines do not execute {other}")
        return [self.reply(command)]

    def reply(self, command: Command, **result: object) -> CommandDone:
        if isinstance(command.body, SetState):
            result = {"update": self.update, "num_kept": 1, "freed_bytes": 10}
        return CommandDone(member=self.engine, number=command.number, result=result)


class SteeredFleet:
    """`Control` with engines and clients. `advance` and `engine_exits` are events; answers are kept by call."""

    def __init__(
        self,
        num_engines: int = 2,
        *,
        num_clients: int = 2,
        shares_experts: bool = False,
        workers: int = 1,
        max_adapters: int = 2,
    ):
        self.now = 1000.0
        self.shares_experts = shares_experts
        self.control = Control(
            SteeredInstance(
                "i",
                ranks=range(num_engines),
                workers_per_engine=workers,
                num_workers=num_engines * workers,
                shares_experts=shares_experts,
                max_adapters=max_adapters,
                model_names=["model"],
            ),
            weight_update_timeout=300.0,
        )
        self.engines: dict[EngineId, SteeredEngine] = {}
        self.next_ids = [EngineId("i", rank) for rank in range(num_engines)]
        self.clients = [ClientId("i", index) for index in range(num_clients)]
        self.client_inboxes: dict[ClientId, list[Command]] = {client: [] for client in self.clients}
        self.client_states: dict[ClientId, InstanceState] = {}
        """States that clients were told to adopt."""
        self.published = InstanceState()
        self.num_calls = 0
        self.open_calls: dict[int, tuple[ClientId, float]] = {}
        """Clients and deadlines of calls that have no answer."""
        self.answers: dict[int, ControlReturned] = {}
        for client in self.clients:
            self.control.attach(client, self.now)
        for rank in range(num_engines):
            self.start_engine(rank)

    # Events.

    def call(self, request, *, client=0, timeout=SECONDS, operation_id=None) -> int:
        """Make a call. Returns its number."""
        self.num_calls += 1
        call_id = self.num_calls
        self.open_calls[call_id] = self.clients[client], self.now + timeout
        self._handle(
            self.control.call(
                ControlCall(
                    client=self.clients[client],
                    call_id=call_id,
                    operation_id=operation_id or f"operation-{call_id}",
                    request=request,
                    timeout=timeout,
                ),
                self.now,
            )
        )
        return call_id

    def run(self, request, **options):
        """Make a call, let everybody do everything, and return the answer, or the failure."""
        call_id = self.call(request, **options)
        self.settle()
        return self.outcome(call_id)

    def outcome(self, call_id: int):
        returned = self.answers[call_id]
        return returned.failure if returned.failure is not None else unpack(returned.answer)

    def attach_engine(self, rank: int) -> SteeredEngine:
        engine = self.next_ids[rank]
        self.next_ids[rank] = next_incarnation(engine)
        self.engines[engine] = made = SteeredEngine(
            engine, self.control.attach(engine, self.now), shares_experts=self.shares_experts
        )
        return made

    def report_started(self, engine: SteeredEngine, update: int = 0) -> None:
        engine.is_started, engine.update = True, update
        self._handle(self.control.start(engine.engine, update, self.now))

    def start_engine(self, rank: int, update: int = 0) -> SteeredEngine:
        engine = self.attach_engine(rank)
        self.report_started(engine, update)
        return engine

    def of_rank(self, rank: int) -> SteeredEngine:
        return next(engine for engine in self.engines.values() if engine.engine.rank == rank)

    def engine_exits(self, rank: int, cause: str = "it was killed", *, returns: bool = True) -> None:
        engine = self.of_rank(rank).engine
        del self.engines[engine]
        self._handle(self.control.leave(engine, cause, returns, self.now))

    def client_exits(self, index: int) -> None:
        client = self.clients[index]
        self.open_calls = {number: call for number, call in self.open_calls.items() if call[0] != client}
        self.client_inboxes[client] = []
        self._handle(self.control.leave(client, "it was killed", True, self.now))

    def advance(self, seconds: float) -> None:
        """Let time pass, with every deadline on the way."""
        end = self.now + seconds
        while (deadline := self.control.deadline) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self._handle(self.control.pass_time(self.now))
        self.now = end

    # Steps of members.

    def execute_next(self, rank: int, failure: Failure | None = None) -> bool:
        """Have an engine execute its next command, or fail to. Returns False if it has none."""
        engine = self.of_rank(rank)
        if not engine.is_started or not engine.inbox:
            return False
        command = engine.inbox.pop(0)
        if failure is not None:
            engine.received.append(command.body)
            self.deliver(CommandDone(member=engine.engine, number=command.number, failure=failure))
            return True
        for done in engine.execute(command):
            self.deliver(done)
        return True

    def end_requests(self, rank: int) -> None:
        """Let the requests end that a pause waits for."""
        engine = self.of_rank(rank)
        engine.has_running = False
        if engine.waiting is not None:
            command, engine.waiting = engine.waiting, None
            self.deliver(engine.reply(command))

    def client_executes_next(self, index: int) -> bool:
        client = self.clients[index]
        if not self.client_inboxes[client]:
            return False
        command = self.client_inboxes[client].pop(0)
        if isinstance(command.body, SetState):
            self.client_states[client] = command.body.state
            self.deliver(CommandDone(member=client, number=command.number))
            return True
        assert isinstance(command.body, AbortRequests)
        self.deliver(CommandDone(member=client, number=command.number, result={"aborted": 3}))
        return True

    def deliver(self, done: CommandDone) -> None:
        self._handle(self.control.on_done(done, self.now))

    def settle(self) -> None:
        """Let all members execute all commands."""
        ranks = [engine.engine.rank for engine in self.engines.values()]
        while any(self.execute_next(rank) for rank in ranks if self._has(rank)) or any(
            self.client_executes_next(index) for index in range(len(self.clients))
        ):
            pass

    def _has(self, rank: int) -> bool:
        return any(engine.engine.rank == rank for engine in self.engines.values())

    def _handle(self, effects) -> None:
        for effect in sorted(effects, key=lambda effect: isinstance(effect, ReplaceEngine)):
            match effect:
                case SendCommand(EngineId() as engine, command):
                    if engine in self.engines:
                        self.engines[engine].inbox.append(command)
                case SendCommand(client, command):
                    self.client_inboxes[client].append(command)
                case SendAnswer(client, answer):
                    if answer.call_id in self.open_calls:
                        assert self.open_calls.pop(answer.call_id)[0] == client
                    assert answer.call_id not in self.answers, "a call has two answers"
                    self.answers[answer.call_id] = answer
                case PublishState(state):
                    assert state.update in (self.published.update, self.published.update + 1)
                    self.published = state
                case JoinEngine(engine):
                    assert not self.engines[engine].has_joined
                    self.engines[engine].has_joined = True
                case ReplaceEngine(engine):
                    if engine in self.engines:
                        self.engine_exits(engine.rank, "it was replaced")
