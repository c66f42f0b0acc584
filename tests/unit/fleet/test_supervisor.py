"""The runtime of the fleet: a supervisor with real sockets and timers. Its decisions are tested without them, with
`FleetState`."""

from __future__ import annotations

import pytest
from fleet_fakes import INFO, FakeMember, fleet, in_loop, left

from eagleray.errors import EngineFailed
from eagleray.fleet import timeouts
from eagleray.identity import ClientId, EngineId, next_incarnation
from eagleray.messages.lifecycle import Alive, Bound, EngineStarted, Register, Unreachable
from eagleray.messages.membership import Joined
from eagleray.transport.inbox import Outbox

ENGINES = [EngineId("i", rank) for rank in range(2)]
API_SERVER = ClientId("i", 0)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(timeouts, "FIRST_RESTART_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(timeouts, "DISCONNECT_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(timeouts, "CONNECTION_POLL_SECONDS", 0.02)


@in_loop
async def test_supervisor_start_clients_receive_joined_of_engines_and_engines_of_clients():
    async with fleet(data_parallel_size=2, api_server_count=1) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(3)]}
        assert set(processes) == {*ENGINES, API_SERVER}
        client = await it.bring_up(processes[API_SERVER])
        assert (client.attach.supervisor, client.attach.members) == (it.address, [])
        assert client.attach.heartbeat
        first = await it.bring_up(processes[ENGINES[0]])
        assert await client.receive() == Joined(ENGINES[0], first.inbox.address, INFO)
        assert not it.supervisor.serving.is_set()
        second = await it.bring_up(processes[ENGINES[1]])
        assert second.attach.members == [Joined(API_SERVER, client.inbox.address)]
        assert await client.receive() == Joined(ENGINES[1], second.inbox.address, INFO)
        await it.supervisor.serving.wait()
        assert it.supervisor.engines == set(ENGINES)


@in_loop
async def test_supervisor_processes_ignore_every_signal_stop_returns(monkeypatch):
    monkeypatch.setattr(timeouts, "STOP_TIMEOUT_SECONDS", 0.02)
    async with fleet(api_server_count=1) as it:
        processes = [await it.launcher.next() for _ in range(2)]
        await it.supervisor.stop(0.0)
        for process in processes:
            assert process.signals[:2] == ["terminate", "kill"]
            process.has_ended = True


@in_loop
async def test_supervisor_engine_silent_is_killed_and_replaced():
    async with fleet(data_parallel_size=2) as it:
        observer = await it.adopt()
        processes = [await it.launcher.next(), await it.launcher.next()]
        engines = [await it.bring_up(process) for process in processes]
        assert {(await observer.receive()).member for _ in range(2)} == set(ENGINES[:2])
        engines[0].heartbeats.close()  # as if it were stopped
        message = await observer.receive()
        assert left(ENGINES[0])(message)
        assert "it was silent for" in message.cause
        assert processes[0].signals == ["kill"]
        assert not it.launcher.has_new
        processes[0].end()
        assert (await it.launcher.next()).id == next_incarnation(ENGINES[0])
        assert processes[1].signals == []


@in_loop
async def test_supervisor_spawn_raises_is_retried():
    async with fleet(data_parallel_size=1) as it:
        observer, process = await it.adopt(), await it.launcher.next()
        it.launcher.failures = [BlockingIOError(11, "Resource temporarily unavailable")] * 2
        process.end()
        assert (await observer.receive()).member == ENGINES[0]
        for member in (next_incarnation(ENGINES[0]), next_incarnation(next_incarnation(ENGINES[0]))):
            message = await observer.receive()
            assert left(member)(message)
            assert "Resource temporarily unavailable" in message.cause
        assert (await it.launcher.next()).id.incarnation == 3


@in_loop
async def test_supervisor_unexpected_exception_ends_instance(monkeypatch):
    async with fleet() as it:
        process = await it.launcher.next()
        monkeypatch.setattr(it.supervisor._state, "handle", lambda *args, **kwargs: 1 / 0)
        process.report(Bound(process.id, "ipc:///nowhere"))
        with pytest.raises(EngineFailed, match="the supervisor failed: ZeroDivisionError"):
            await it.supervisor.failed


@in_loop
async def test_connection_monitor_broken_from_supervisor_replaces_member(monkeypatch):
    async with fleet() as it:
        process = await it.launcher.next()
        await it.bring_up(process)
        broken = [[process.id]]
        monkeypatch.setattr(it.supervisor._outbox, "pop_broken", lambda: broken.pop() if broken else [])
        await it.until(lambda: process.signals == ["kill"])
        process.end()
        assert (await it.launcher.next()).id == next_incarnation(process.id)


async def register(it, lease: float = 30.0) -> FakeMember:
    external = FakeMember(it, "external")
    external.send(Register(external.inbox.address, lease))
    await external.attached()
    return external


@in_loop
async def test_supervisor_malformed_messages_are_dropped():
    async with fleet() as it:
        foreign = Outbox(lambda message: [message])
        foreign.connect("supervisor", it.address)
        for nonsense in (b"", b"hello", b"\x80", b"\xc1" * 100):
            foreign.send("supervisor", nonsense)
        confused = FakeMember(it, "confused")
        for address, lease in (("nowhere", 10.0), ("ipc://" + "x" * 1000, 10.0), (confused.inbox.address, -1.0)):
            confused.send(Register(address, lease))
        confused.send(Alive(ClientId("i", 5)))
        confused.send(Unreachable(ClientId("i", 5), EngineId("i", 77)))
        confused.send(EngineStarted(EngineId("i", 77), INFO))
        external = await register(it)
        assert external.attach.members == []
        assert not it.supervisor.failed.done()
        foreign.close()
