"""The fleet's state machine without processes, sockets and clocks: tests pass in events and look at the actions."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from eagleray.config.build import build_config
from eagleray.errors import EagleRayError, ProcessCrashed
from eagleray.fleet.events import Adopt, Event, Exited, StartApiServers, StartEngines, TimePassed
from eagleray.fleet.replica import Replica, Up
from eagleray.fleet.state import FleetState
from eagleray.fleet.turn import Action, Connect, Disconnect, FailInstance, Kill, Send, Serve, Spawn, Stopped, Terminate
from eagleray.identity import ClientId, EngineId, MemberId, next_incarnation, replica_key
from eagleray.messages.checkpoints import CheckpointFetched, FetchCheckpoint
from eagleray.messages.control import Command, CommandDone, ControlCall, ControlRequest, ControlReturned
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Attach, Bound, ClientStarted, EngineStarted, Knows
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.plain import unpack
from eagleray.messages.scaling import FleetRequest

KILLED = "it was killed by SIGKILL"
INFO = EngineInfo(architecture="Tiny", vocab_size=500, max_model_len=64, block_size=4, num_kv_blocks=100)
OBSERVER = ClientId("i", 900)


class Machine:
    """A `FleetState`, with what its actions have led to. Processes exit when the test says so."""

    def __init__(self, **options: Any) -> None:
        self.config = build_config(**options)
        self.state = FleetState(self.config, "i", unix_clock=lambda: 1000.0 + self.now, shortage=self._shortage)
        self.now = 0.0
        self.shortage: str | None = None
        """Why engines that are added find no room."""
        self.running: dict[MemberId, list[str]] = {}
        """Processes, with the signals that they were sent."""
        self.spawned: list[MemberId] = []
        self.attached: dict[MemberId, Attach] = {}
        """Members with a connection."""
        self.received: defaultdict[MemberId, list[Any]] = defaultdict(list)
        """Messages to each member, but `Attach`."""
        self.is_serving = self.has_stopped = False
        self.error: Exception | None = None
        self._num_calls = 0
        self._executed: set[int] = set()
        """Numbers of commands."""

    def _shortage(self, num_added: int) -> str | None:
        return self.shortage

    def handle(self, event: Event) -> list[Action]:
        actions = self.state.handle(event, self.now)
        for action in actions:
            self._carry_out(action)
        return actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case Spawn(member):
                others = [other for other in self.running if replica_key(other) == replica_key(member)]
                assert not others, f"{member.label} is spawned while {others[0].label} still runs"
                assert member not in self.spawned, f"{member.label} is spawned again"
                self.running[member] = []
                self.spawned.append(member)
            case Terminate(member) | Kill(member):
                if member in self.running:
                    self.running[member].append(type(action).__name__.lower())
            case Connect(member, _, attach):
                assert member not in self.attached
                self.attached[member] = attach
            case Disconnect(member):
                self.attached.pop(member, None)
            case Send(receivers, message):
                for receiver in receivers:
                    self.received[receiver].append(message)
            case Serve():
                self.is_serving = True
            case FailInstance(error):
                self.error = error
            case Stopped():
                self.has_stopped = True

    # Boot.

    @classmethod
    def serving(cls, **options: Any) -> Machine:
        """Return a machine whose engines serve an observing client, and API servers if there are some."""
        machine = cls(**options)
        machine.boot()
        return machine

    def boot(self) -> None:
        self.handle(StartEngines(tuple(range(self.config.parallel.data_parallel_size))))
        self.handle(StartApiServers(tuple(range(self.config.serving.api_server_count))))
        self.adopt()
        for member in list(self.running):
            self.bring_up(member)
        assert self.is_serving

    def adopt(self) -> None:
        self.handle(Adopt(OBSERVER, "of observer"))
        self.handle(ClientStarted(OBSERVER))

    # Events of members.

    def bind(self, member: MemberId) -> None:
        self.handle(Bound(member, f"of {member.label}"))

    def start(self, member: MemberId) -> None:
        """Have an attached member report that it has started, and clients that they know it."""
        self.handle(EngineStarted(member, INFO) if isinstance(member, EngineId) else ClientStarted(member))
        self.confirm()

    def bring_up(self, member: MemberId) -> None:
        self.bind(member)
        self.start(member)

    def confirm(self) -> None:
        """Have every client confirm the engines that it was told of."""
        for client in [member for member in self.attached if isinstance(member, ClientId)]:
            for joined in [*self.attached[client].members, *self.received[client]]:
                if isinstance(joined, Joined) and isinstance(joined.member, EngineId):
                    self.handle(Knows(client, joined.member))

    def exit(self, member: MemberId, reason: str = KILLED) -> None:
        """Have a process exit."""
        del self.running[member]
        crashed = Failure.of(ProcessCrashed(reason)) if "SIGSEGV" in reason else Failure.noticed(reason)
        self.handle(Exited(member, crashed))

    def exit_with(self, member: MemberId, error: EagleRayError) -> None:
        """Have a process exit because of an exception."""
        del self.running[member]
        self.handle(Exited(member, Failure.of(error)))

    def exit_all(self) -> None:
        """Have the processes exit that were told to."""
        for member, signals in list(self.running.items()):
            if signals or not isinstance(self.replica(member).state, Up):
                self.exit(member, "it ended with exit code 0")

    def execute(self, member: MemberId, **result: Any) -> Command:
        """Have a member execute the first command that it has not executed."""
        command = next(
            it for it in self.received[member] if isinstance(it, Command) and it.number not in self._executed
        )
        self._executed.add(command.number)
        self.handle(CommandDone(member=member, number=command.number, result=result))
        return command

    def fetch(self, failure: EagleRayError | None = None) -> ClientId:
        """Have the client that was asked last for a checkpoint reply. Returns the client."""
        client, message = next(
            (member, message)
            for member in reversed(self.attached)
            for message in reversed(self.received[member])
            if isinstance(message, FetchCheckpoint)
        )
        assert isinstance(client, ClientId)
        options = {} if failure is not None else {**message.options, "revision": "pinned"}
        reason = None if failure is None else Failure.of(failure)
        self.received[client].remove(message)
        self.handle(CheckpointFetched(client, message.operation_id, options=options, failure=reason))
        return client

    # Time.

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with every timer at its time."""
        end = self.now + seconds
        while (deadline := self.state.deadline) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.handle(TimePassed())
        self.now = end

    # State, for assertions.

    def replica(self, member: MemberId) -> Replica:
        return self.state._replicas[replica_key(member)]

    def is_up(self, member: MemberId) -> bool:
        replica = self.state._replicas.get(replica_key(member))
        return replica is not None and replica.member == member and isinstance(replica.state, Up)

    def events(self, member: MemberId = OBSERVER) -> list[str]:
        """Return the changes of the membership that a member was told, as words."""
        told = []
        for message in self.received[member]:
            if isinstance(message, Joined):
                told.append(f"+{message.member.label}")
            elif isinstance(message, Left):
                told.append(f"-{message.member.label}" + ("" if message.returns else " for ever"))
        return told

    def forget(self) -> None:
        """Forget the messages so far."""
        self.received.clear()

    # Calls.

    def call(
        self,
        request: ControlRequest | FleetRequest,
        *,
        operation_id: str | None = None,
        timeout: float = 600.0,
        client: ClientId = OBSERVER,
    ) -> int:
        """Have a client make a call. Returns its number, for `answer`."""
        self._num_calls += 1
        self.handle(
            ControlCall(
                client=client,
                call_id=self._num_calls,
                operation_id=operation_id or f"op-{self._num_calls}",
                request=request,
                timeout=timeout,
            )
        )
        return self._num_calls

    def answer(self, call_id: int) -> dict[str, Any] | Failure | None:
        """Return the answer to a call, or its failure; None if there is none yet."""
        found = [
            message
            for messages in self.received.values()
            for message in messages
            if isinstance(message, ControlReturned) and message.call_id == call_id
        ]
        assert len(found) <= 1, "a call is answered once"
        if not found:
            return None
        return found[0].failure or unpack(found[0].answer)


def later(member: MemberId, count: int = 1) -> MemberId:
    """Return the incarnation that is `count` after `member`."""
    for _ in range(count):
        member = next_incarnation(member)
    return member
