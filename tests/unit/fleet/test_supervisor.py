from __future__ import annotations

import asyncio

import pytest
from fleet_fakes import INFO, KILLED, FakeMember, fleet, in_loop, joined, left

from eagleray.errors import ConfigError, EngineFailed
from eagleray.fleet import timeouts
from eagleray.fleet.replica import Up
from eagleray.identity import ClientId, EngineId, next_incarnation
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import (
    Alive,
    Attach,
    Bound,
    EngineStarted,
    Knows,
    Register,
    Stop,
    Unreachable,
)
from eagleray.messages.membership import Joined, Left
from eagleray.transport.inbox import Outbox

ENGINES = [EngineId("i", rank) for rank in range(3)]
API_SERVER = ClientId("i", 0)

MISTAKE = Failure.of(ConfigError("the cache is too small"))
BUG = Failure.of(ZeroDivisionError("there is a bug"))


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(timeouts, "FIRST_RESTART_DELAY_SECONDS", 0.01)


@in_loop
async def test_supervisor_start_members_receive_each_others_joined(caplog):
    caplog.set_level("INFO", logger="eagleray")
    async with fleet(data_parallel_size=2, api_server_count=1) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(3)]}
        assert set(processes) == {*ENGINES[:2], API_SERVER}
        client = await it.bind(processes[API_SERVER])
        assert client.attach == Attach(API_SERVER, it.address, [], client.attach.heartbeat)
        assert client.attach.heartbeat
        client.start()
        await it.until(lambda: isinstance(it.supervisor._state._replicas.of(API_SERVER).state, Up))
        first = await it.bring_up(processes[ENGINES[0]])
        assert await client.receive() == Joined(ENGINES[0], first.inbox.address, INFO)
        assert not it.supervisor.serving.is_set()
        second = await it.bring_up(processes[ENGINES[1]])
        known = Joined(ENGINES[0], first.inbox.address, INFO)
        assert known in second.attach.members
        assert Joined(API_SERVER, client.inbox.address) in second.attach.members
        assert await client.receive() == Joined(ENGINES[1], second.inbox.address, INFO)
        await it.supervisor.serving.wait()
        assert it.supervisor.engines == set(ENGINES[:2])
        assert [message for message in caplog.messages if "joined" in message] == [
            "engine-0 has joined",
            "engine-1 has joined",
        ]


@in_loop
async def test_supervisor_api_server_knows_engines_serving_is_set():
    """A caller that waits for `serving` may send a request at once."""
    async with fleet(api_server_count=1) as it:
        engine, api_server = [await it.launcher.next() for _ in range(2)]
        client = await it.bind(api_server)
        client.sends_knows = False
        client.start()
        await it.bring_up(engine)
        assert joined(engine.id)(await client.receive())
        await asyncio.sleep(0.1)
        assert not it.supervisor.serving.is_set()
        client.send(Knows(api_server.id, engine.id))
        await it.supervisor.serving.wait()


@in_loop
async def test_supervisor_engine_killed_starts_next_incarnation():
    async with fleet() as it:
        observer, process = await it.adopt(), await it.launcher.next()
        await it.bring_up(process)
        await it.supervisor.serving.wait()
        assert joined(ENGINES[0])(await observer.receive())
        process.end()
        assert await observer.receive() == Left(ENGINES[0], KILLED, returns=True)
        replacement = await it.launcher.next()
        assert replacement.id == next_incarnation(ENGINES[0])
        assert replacement.label == "engine-0.1"
        await it.bring_up(replacement)
        assert joined(next_incarnation(ENGINES[0]))(await observer.receive())
        assert not it.supervisor.failed.done()
        later = await it.adopt()
        assert [type(event) for event in later.history] == [Joined, Joined, Left, Joined]
        assert [event.member for event in later.history[2:]] == [ENGINES[0], replacement.id]
        assert 0 < later.history[2].time <= later.history[3].time


@in_loop
async def test_supervisor_engine_reports_failure_left_now_replacement_after_exit():
    async with fleet() as it:
        observer, process = await it.adopt(), await it.launcher.next()
        await it.bring_up(process)
        assert joined(ENGINES[0])(await observer.receive())
        process.fail(BUG)
        assert await observer.receive() == Left(ENGINES[0], str(BUG), returns=True)
        assert it.supervisor.engines == {next_incarnation(ENGINES[0])}
        assert not it.launcher.has_new
        process.end("it ended with exit code 1")
        assert (await it.launcher.next()).id == next_incarnation(ENGINES[0])


@in_loop
async def test_supervisor_ended_over_the_report_wire_replaces_current_incarnation_only():
    async with fleet() as it:
        observer, process = await it.adopt(), await it.launcher.next()
        engine = await it.bring_up(process)
        assert joined(ENGINES[0])(await observer.receive())
        engine.send(Ended(ENGINES[0], BUG))
        assert await observer.receive() == Left(ENGINES[0], str(BUG), returns=True)
        process.end()
        replacement = await it.launcher.next()
        second = await it.bring_up(replacement)
        engine.send(Ended(ENGINES[0], BUG))  # of a past incarnation
        assert joined(replacement.id)(await observer.receive())
        second.send(Ended(replacement.id, BUG))
        assert left(replacement.id)(await observer.receive())


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
async def test_replica_start_timeout_is_killed_and_restarted(monkeypatch):
    monkeypatch.setattr(timeouts, "START_MARGIN_SECONDS", 0.0)
    async with fleet(startup_timeout=0.1) as it:
        process = await it.launcher.next()
        await it.until(lambda: process.signals == ["kill"])
        process.end()
        assert (await it.launcher.next()).id == next_incarnation(ENGINES[0])


@in_loop
async def test_replica_failed_but_running_is_killed_again_and_not_replaced(monkeypatch):
    monkeypatch.setattr(timeouts, "STOP_TIMEOUT_SECONDS", 0.05)
    async with fleet() as it:
        process = await it.launcher.next()
        process.fail(BUG)
        await it.until(lambda: process.signals[:1] == ["kill"])
        await it.until(lambda: len(process.signals) > 1)
        assert not it.launcher.has_new


@in_loop
async def test_supervisor_user_error_at_first_start_ends_instance():
    async with fleet(data_parallel_size=2, api_server_count=1) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(3)]}
        client = await it.bring_up(processes[API_SERVER])
        processes[ENGINES[0]].fail(MISTAKE)
        with pytest.raises(ConfigError, match="the cache is too small"):
            await it.supervisor.failed
        assert await client.receive() == Left(ENGINES[0], str(MISTAKE), returns=False)
        stop = await client.receive()
        assert isinstance(stop, Stop)
        assert stop.cause == "the cache is too small"
        for process in processes.values():
            process.end()
        await it.until(lambda: it.supervisor.engines == set())
        assert not it.launcher.has_new


@in_loop
async def test_supervisor_user_error_after_serving_is_restarted():
    async with fleet() as it:
        process = await it.launcher.next()
        await it.bring_up(process)
        await it.supervisor.serving.wait()
        process.end()
        process = await it.launcher.next()
        process.fail(MISTAKE)
        process.end()
        assert (await it.launcher.next()).id == next_incarnation(next_incarnation(ENGINES[0]))


@in_loop
async def test_supervisor_killed_thirty_times_is_restarted_each_time(monkeypatch):
    monkeypatch.setattr(timeouts, "MAX_API_SERVER_DELAY_SECONDS", 0.015)
    monkeypatch.setattr(timeouts, "MAX_ENGINE_DELAY_SECONDS", 0.02)
    async with fleet(data_parallel_size=2, api_server_count=1, max_engine_restarts=1) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(3)]}
        for process in processes.values():
            await it.bring_up(process)
        for blow in range(30):
            for process in processes.values():
                process.end(["it was killed by SIGKILL", "it was killed by SIGSEGV"][blow % 2])
            replacements = [await it.launcher.next() for _ in processes]
            processes = {process.id: process for process in replacements}
            if blow % 10 == 9:
                for process in replacements:
                    await it.bring_up(process)
        assert {process.id.incarnation for process in processes.values()} == {30}
        assert not it.supervisor.failed.done()


@in_loop
async def test_supervisor_same_start_failure_twice_before_serving_ends_instance():
    async with fleet(data_parallel_size=2) as it:
        first = [await it.launcher.next() for _ in range(2)]
        failing = next(process for process in first if process.id == ENGINES[0])
        failing.fail(BUG)
        failing.end("it ended with exit code 1")
        second_start = await it.launcher.next()
        assert not it.supervisor.failed.done()
        second_start.fail(BUG)
        with pytest.raises(EngineFailed, match="there is a bug"):
            await it.supervisor.failed


@in_loop
async def test_supervisor_same_start_failure_twice_after_serving_gives_up_engine():
    async with fleet(data_parallel_size=2) as it:
        processes = [await it.launcher.next() for _ in range(2)]
        for process in processes:
            await it.bring_up(process)
        await it.supervisor.serving.wait()
        for _ in range(2):
            processes[0].end()
            processes[0] = await it.launcher.next()
            processes[0].fail(MISTAKE)
        await it.until(lambda: it.supervisor.engines == {processes[1].id})
        assert not it.supervisor.failed.done()
        processes[1].end()
        for _ in range(2):
            last = await it.launcher.next()
            last.fail(MISTAKE)
            last.end("it ended with exit code 1")
        with pytest.raises(ConfigError, match="the cache is too small"):
            await it.supervisor.failed


@in_loop
async def test_supervisor_budget_spent_gives_up_engine_and_last_one_ends_instance():
    async with fleet(data_parallel_size=2, max_engine_restarts=1) as it:
        observer = await it.adopt()
        for returns in (True, False):
            while (process := await it.launcher.next()).id.rank != 0:
                await it.bring_up(process)
                other = process
                assert joined(process.id)(await observer.receive())
            await it.bring_up(process)
            assert joined(process.id)(await observer.receive())
            process.fail(BUG)
            assert await observer.receive() == Left(process.id, str(BUG), returns=returns)
            process.end()
        await it.supervisor.serving.wait()
        assert it.supervisor.engines == {other.id}
        assert not it.supervisor.failed.done()
        other.fail(BUG)
        other.end()
        assert (await observer.receive()).returns
        last = await it.launcher.next()
        last.fail(Failure.of(OSError("its disk is full")))
        with pytest.raises(EngineFailed, match=r"engine-1\.1 failed: OSError: its disk is full"):
            await it.supervisor.failed
        assert not (await observer.receive()).returns
        assert (await observer.receive()).cause.startswith("engine-1.1 failed: OSError: its disk is full")


@in_loop
async def test_supervisor_api_server_replaced_attach_lists_missing_engine():
    async with fleet(data_parallel_size=2, api_server_count=1) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(3)]}
        for process in processes.values():
            await it.bring_up(process)
        await it.supervisor.serving.wait()
        processes[ENGINES[1]].fail(BUG)
        processes[API_SERVER].end()
        process = await it.launcher.next()
        assert process.id == next_incarnation(API_SERVER)
        client = await it.bind(process)
        assert [member.member for member in client.attach.members] == [ENGINES[0]]
        assert client.attach.missing == [Left(ENGINES[1], str(BUG), returns=True, engine=INFO)]
        client.start()
        processes[ENGINES[1]].end()
        await it.bring_up(await it.launcher.next())
        assert joined(next_incarnation(ENGINES[1]))(await client.receive())


@in_loop
async def test_supervisor_started_message_of_exited_engine_is_ignored():
    async with fleet() as it:
        observer, process = await it.adopt(), await it.launcher.next()
        engine = await it.bind(process)
        process.end()
        assert left(ENGINES[0])(await observer.receive())
        replacement = await it.launcher.next()
        engine.send(EngineStarted(ENGINES[0], INFO))
        await it.bring_up(replacement)
        assert joined(replacement.id)(await observer.receive())


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


# External clients


async def register(it, lease: float = 30.0) -> FakeMember:
    external = FakeMember(it, "external")
    external.send(Register(external.inbox.address, lease))
    await external.attached()
    return external


@in_loop
async def test_external_clients_register_attaches_and_publishes():
    async with fleet() as it:
        process = await it.launcher.next()
        engine = await it.bring_up(process)
        external = await register(it)
        assert external.attach.member.index >= 1_000_000
        assert external.attach.heartbeat == b""
        assert external.attach.members == [Joined(ENGINES[0], engine.inbox.address, INFO)]
        external.start()
        assert await engine.receive() == Joined(external.attach.member, external.inbox.address)
        process.end()
        assert left(ENGINES[0])(await external.receive())


@in_loop
async def test_external_clients_lease_expired_leaves_and_may_register_again():
    async with fleet() as it:
        engine = await it.bring_up(await it.launcher.next())
        external = await register(it, lease=0.3)
        external.start()
        assert joined(external.attach.member)(await engine.receive())
        for _ in range(10):
            external.send(Alive(external.attach.member))
            await asyncio.sleep(0.05)
        for member in (engine, external):  # the client itself receives it too
            message = await member.receive()
            assert left(external.attach.member)(message)
            assert "0.3 s" in message.cause
        external.send(Alive(external.attach.member))  # too late
        former = external.attach.member
        external.send(Register(external.inbox.address, 30.0))
        assert (await external.attached()).member not in (former, ENGINES[0])


@in_loop
async def test_external_clients_register_twice_gets_new_identity():
    async with fleet() as it:
        engine = await it.bring_up(await it.launcher.next())
        external = await register(it)
        external.start()
        first = external.attach.member
        assert joined(first)(await engine.receive())
        external.send(Register(external.inbox.address, 30.0))
        assert (await external.attached()).member != first
        assert left(first)(await engine.receive())


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(timeouts, "DISCONNECT_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(timeouts, "CONNECTION_POLL_SECONDS", 0.02)


@pytest.mark.parametrize("is_engines_side", [True, False])
@in_loop
async def test_connection_monitor_broken_between_engine_and_api_server_replaces_engine(short_grace, is_engines_side):
    async with fleet(api_server_count=1) as it:
        processes = [await it.launcher.next() for _ in range(2)]
        engine, client = [await it.bring_up(process) for process in processes]
        pair = (ENGINES[0], API_SERVER) if is_engines_side else (API_SERVER, ENGINES[0])
        (engine if is_engines_side else client).send(Unreachable(*pair))
        message = await client.receive()
        assert left(ENGINES[0])(message)
        assert message.cause == f"the connection from {pair[0].label} to {pair[1].label} broke"
        assert processes[0].signals == ["kill"]
        processes[0].end()
        assert (await it.launcher.next()).id == next_incarnation(ENGINES[0])


@in_loop
async def test_connection_monitor_broken_by_exit_replaces_nothing_else(short_grace):
    async with fleet(data_parallel_size=2) as it:
        observer, processes = await it.adopt(), [await it.launcher.next() for _ in range(2)]
        for process in processes:
            await it.bring_up(process)
            assert joined(process.id)(await observer.receive())
        observer.send(Unreachable(observer.attach.member, processes[0].id))
        processes[0].end()
        assert await observer.receive() == Left(processes[0].id, KILLED, returns=True)
        assert (await it.launcher.next()).id == next_incarnation(processes[0].id)
        await asyncio.sleep(0.3)
        assert not it.launcher.has_new and not processes[1].signals


@pytest.mark.parametrize("is_engines_side", [True, False])
@in_loop
async def test_connection_monitor_broken_to_external_client_evicts_it(short_grace, is_engines_side):
    async with fleet() as it:
        process = await it.launcher.next()
        engine, external = await it.bring_up(process), await register(it)
        external.start()
        me = external.attach.member
        assert joined(me)(await engine.receive())
        pair = (ENGINES[0], me) if is_engines_side else (me, ENGINES[0])
        (engine if is_engines_side else external).send(Unreachable(*pair))
        for member in (engine, external):
            assert left(me)(await member.receive())
        assert not process.signals


@in_loop
async def test_connection_monitor_broken_from_supervisor_replaces_member(short_grace, monkeypatch):
    async with fleet() as it:
        process = await it.launcher.next()
        await it.bring_up(process)
        broken = [[process.id]]
        monkeypatch.setattr(it.supervisor._outbox, "pop_broken", lambda: broken.pop() if broken else [])
        await it.until(lambda: process.signals == ["kill"])
        process.end()
        assert (await it.launcher.next()).id == next_incarnation(process.id)


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
