"""The cost of the fleet's state machine by the number of engines and API servers: no processes, no sockets.

python benchmarks/fleet_scale.py [--engines 10 100 1000] [--events 10000] [--trial]

Boots the fleet, then passes in the events of a long run: `Alive` of external clients, exits with their restarts, calls
with a reply of every engine, and scaling. Prints for each kind of event the microseconds of one, the messages that one
leads to, and the memory of the machine. There are a tenth as many API servers as engines. `--trial` runs a small fleet.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from eagleray.config.build import build_config
from eagleray.fleet.events import Adopt, Event, Exited, StartApiServers, StartEngines, TimePassed
from eagleray.fleet.state import FleetState
from eagleray.fleet.turn import Action, Connect, Send, Spawn
from eagleray.identity import ClientId, EngineId, MemberId
from eagleray.messages.control import AbortRequests, Command, CommandDone, ControlCall, Pause, Resume
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Alive, Bound, ClientStarted, EngineStarted, Knows, Register, Stop
from eagleray.messages.membership import EngineInfo, Joined
from eagleray.messages.scaling import FleetRequest, Scale

INFO = EngineInfo(architecture="Tiny", vocab_size=500, max_model_len=64, block_size=4, num_kv_blocks=100)
KILLED = Failure.noticed("it was killed by SIGKILL")
CALLER = ClientId("i", 900_000)


class Simulation:
    """A fleet whose processes do at once what they are told to."""

    def __init__(self, num_engines: int, num_servers: int) -> None:
        config = build_config(data_parallel_size=num_engines, api_server_count=num_servers)
        self.state = FleetState(config, "i", unix_clock=lambda: 0.0)
        self.now = 0.0
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        """Durations of the events by kind."""
        self.messages: defaultdict[str, int] = defaultdict(int)
        """Messages that the events of a kind have led to, one for each receiver."""
        self.engines: dict[int, EngineId] = {}
        """Processes by rank."""
        self.is_serving = False
        self._pending: list[tuple[str, Event]] = []
        """Events that processes have yet to cause."""
        self._num_calls = 0
        self._num_engines, self._num_servers = num_engines, num_servers

    def handle(self, kind: str, event: Event) -> None:
        begin = time.perf_counter()
        actions = self.state.handle(event, self.now)
        self.seconds[kind].append(time.perf_counter() - begin)
        for action in actions:
            self._react(kind, action)

    def _react(self, kind: str, action: Action) -> None:
        match action:
            case Spawn(member):
                if isinstance(member, EngineId):
                    self.engines[member.rank] = member
                self._pending.append(("Bound", Bound(member, f"tcp://10.0.0.1:{len(self._pending)}")))
            case Connect(member, _, attach):
                self.messages[kind] += 1
                if isinstance(member, EngineId):
                    self._pending.append(("EngineStarted", EngineStarted(member, INFO)))
                else:
                    self._pending.append(("ClientStarted", ClientStarted(member)))
                for joined in attach.members:
                    self._confirm(member, joined)
            case Send(receivers, message):
                self.messages[kind] += len(receivers)
                for receiver in receivers:
                    self._receive(receiver, message)

    def _confirm(self, client: MemberId, joined: Joined) -> None:
        if isinstance(client, ClientId) and isinstance(joined.member, EngineId):
            self._pending.append(("Knows", Knows(client, joined.member)))

    def _receive(self, receiver: MemberId, message: object) -> None:
        match message:
            case Joined():
                self._confirm(receiver, message)
            case Command(number=number):
                self._pending.append(("CommandDone", CommandDone(member=receiver, number=number, result={"update": 0})))
            case Stop():
                if isinstance(receiver, EngineId):
                    self.engines.pop(receiver.rank, None)
                self._pending.append(("Exited", Exited(receiver, KILLED)))

    def settle(self) -> None:
        while self._pending or self._pass_time():
            pending, self._pending = self._pending, []
            for kind, event in pending:
                self.handle(kind, event)

    def _pass_time(self) -> bool:
        """Let the time of the next restart come."""
        if (due := self.state.deadline) is None or due > self.now + 1.0:
            return False
        self.now = max(self.now, due)
        self.handle("TimePassed", TimePassed())
        return True

    # Events.

    def boot(self) -> None:
        self.handle("StartEngines", StartEngines(tuple(range(self._num_engines))))
        self.handle("StartApiServers", StartApiServers(tuple(range(self._num_servers))))
        self.handle("Adopt", Adopt(CALLER, "tcp://10.0.0.1:1"))
        for index in range(10):
            self.handle("Register", Register(f"tcp://10.0.0.2:{index}", 1e9))
        self.settle()
        assert self.state.is_serving

    def call(self, request: FleetRequest | Pause | Resume | AbortRequests) -> None:
        self._num_calls += 1
        number = self._num_calls
        call = ControlCall(client=CALLER, call_id=number, operation_id=str(number), request=request, timeout=600.0)
        self.handle(type(request).__name__, call)
        self.settle()

    def kill_engine(self, rank: int) -> None:
        self.handle("Exited", Exited(self.engines[rank], KILLED))
        self.settle()
        self.now += 60.0  # so that the next restart of this engine has no delay

    def run(self, num_events: int, randomness: random.Random) -> None:
        """Pass in about this number of events: of 100 that clients and failures begin, 94 are `Alive`."""
        total = sum(len(seconds) for seconds in self.seconds.values())
        events: list[tuple[int, Callable[[], None]]] = [
            (94, lambda: self.handle("Alive", Alive(ClientId("i", 1_000_000 + randomness.randrange(10))))),
            (3, lambda: self.kill_engine(randomness.choice(list(self.engines)))),
            (1, lambda: self.call(Pause(mode="keep"))),
            (1, lambda: self.call(Resume())),
            (1, lambda: self.call(Scale(num_engines=self._num_engines + randomness.randrange(3)))),
        ]
        weights, functions = zip(*events, strict=True)
        while sum(len(seconds) for seconds in self.seconds.values()) < total + num_events:
            randomness.choices(functions, weights)[0]()


def report(simulation: Simulation, kinds: list[str]) -> None:
    print(f"  {'event':16} {'number':>8} {'p50 µs':>9} {'p99 µs':>9} {'max µs':>10} {'messages':>9}")
    for kind in kinds:
        if not (seconds := sorted(simulation.seconds[kind])):
            continue
        p50, p99 = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]
        per_event = simulation.messages[kind] / len(seconds)
        print(
            f"  {kind:16} {len(seconds):8} {p50 * 1e6:9.1f} {p99 * 1e6:9.1f} {seconds[-1] * 1e6:10.1f} {per_event:9.1f}"
        )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def measure(num_engines: int, num_events: int) -> None:
    num_servers = max(1, num_engines // 10)
    gc.collect()
    before = resident_bytes()
    simulation = Simulation(num_engines, num_servers)
    begin = time.perf_counter()
    simulation.boot()
    boot_seconds = time.perf_counter() - begin
    in_machine = sum(sum(seconds) for seconds in simulation.seconds.values())
    num_booted = sum(len(seconds) for seconds in simulation.seconds.values())
    print(f"{num_engines} engines, {num_servers} API servers")
    print(f"  boot: {num_booted} events, {in_machine:.2f} s in the machine, {boot_seconds:.2f} s with the simulation")
    gc.collect()
    print(f"  memory: {(resident_bytes() - before) / 1e6:.0f} MB more than before")
    report(simulation, ["Bound", "EngineStarted", "ClientStarted", "Knows"])
    simulation.seconds.clear()
    simulation.messages.clear()
    simulation.run(num_events, random.Random(0))
    total = sum(sum(seconds) for seconds in simulation.seconds.values())
    number = sum(len(seconds) for seconds in simulation.seconds.values())
    print(f"  run: {number} events in {total:.2f} s, {number / total:.0f} events/s")
    report(simulation, sorted(simulation.seconds))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--trial", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.trial:
        arguments.engines, arguments.events = [5], 2000
    logging.getLogger("eagleray").setLevel(logging.CRITICAL)
    for num_engines in arguments.engines:
        measure(num_engines, arguments.events)


if __name__ == "__main__":
    main()
