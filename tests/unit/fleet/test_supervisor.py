from __future__ import annotations

import asyncio

import pytest
from fleet_fakes import INFO, KILLED, FakeMember, fleet, in_loop, joined, left

from eagleray.errors import ConfigError, EngineFailed
from eagleray.fleet import timeouts
from eagleray.identity import ClientId, EngineId, successor
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
async def test_all_take_one_path_and_hear_of_each_other():
    async with fleet(data_parallel_size=2, api_server_count=1) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(3)]}
        assert set(processes) == {*ENGINES[:2], API_SERVER}
        client = await it.bind(processes[API_SERVER])
        assert client.attach == Attach(API_SERVER, it.address, [], client.attach.heartbeat)
        assert client.attach.heartbeat
        client.start()
        await it.until(lambda: it.supervisor._replica_of(API_SERVER).phase.name == "UP")
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


@in_loop
async def test_it_serves_when_its_api_servers_have_heard_of_its_engines():
    """Who is told that it serves may ask at once."""
    async with fleet(api_server_count=1) as it:
        engine, api_server = [await it.launcher.next() for _ in range(2)]
        client = await it.bind(api_server)
        client.tells_whom_it_knows = False
        client.start()
        await it.bring_up(engine)
        assert joined(engine.id)(await client.receive())
        await asyncio.sleep(0.1)
        assert not it.supervisor.serving.is_set()
        client.send(Knows(api_server.id, engine.id))
        await it.supervisor.serving.wait()


@in_loop
async def test_a_killed_engine_is_replaced_by_its_successor():
    async with fleet() as it:
        observer, process = await it.adopt(), await it.launcher.next()
        await it.bring_up(process)
        await it.supervisor.serving.wait()
        assert joined(ENGINES[0])(await observer.receive())
        process.end()
        assert await observer.receive() == Left(ENGINES[0], KILLED, returns=True)
        replacement = await it.launcher.next()
        assert replacement.id == successor(ENGINES[0])
        assert replacement.label == "engine-0.1"
        await it.bring_up(replacement)
        assert joined(successor(ENGINES[0]))(await observer.receive())
        assert not it.supervisor.failed.done()


@in_loop
async def test_what_failed_is_told_at_once_and_replaced_only_when_it_is_gone():
    async with fleet() as it:
        observer, process = await it.adopt(), await it.launcher.next()
        await it.bring_up(process)
        assert joined(ENGINES[0])(await observer.receive())
        process.fail(BUG)
        assert await observer.receive() == Left(ENGINES[0], str(BUG), returns=True)
        assert it.supervisor.engines == {successor(ENGINES[0])}
        assert not it.launcher.has_new
        process.end("it ended with exit code 1")
        assert (await it.launcher.next()).id == successor(ENGINES[0])


@in_loop
async def test_a_failure_may_come_by_wire():
    async with fleet() as it:
        observer, process = await it.adopt(), await it.launcher.next()
        engine = await it.bring_up(process)
        assert joined(ENGINES[0])(await observer.receive())
        engine.send(Ended(ENGINES[0], BUG))
        assert await observer.receive() == Left(ENGINES[0], str(BUG), returns=True)
        process.end()
        replacement = await it.launcher.next()
        second = await it.bring_up(replacement)
        engine.send(Ended(ENGINES[0], BUG))  # of an incarnation of the past
        assert joined(replacement.id)(await observer.receive())
        second.send(Ended(replacement.id, BUG))
        assert left(replacement.id)(await observer.receive())


@in_loop
async def test_what_falls_silent_is_killed_and_then_replaced():
    async with fleet(data_parallel_size=2) as it:
        observer = await it.adopt()
        processes = [await it.launcher.next(), await it.launcher.next()]
        engines = [await it.bring_up(process) for process in processes]
        assert {(await observer.receive()).member for _ in range(2)} == set(ENGINES[:2])
        engines[0].pulse.close()  # as if it were stopped
        news = await observer.receive()
        assert left(ENGINES[0])(news)
        assert "it was silent for" in news.cause
        assert processes[0].signals == ["kill"]
        assert not it.launcher.has_new
        processes[0].end()
        assert (await it.launcher.next()).id == successor(ENGINES[0])
        assert processes[1].signals == []


@in_loop
async def test_a_start_that_takes_too_long_is_ended_and_tried_again(monkeypatch):
    monkeypatch.setattr(timeouts, "START_MARGIN_SECONDS", 0.0)
    async with fleet(startup_timeout=0.1) as it:
        process = await it.launcher.next()
        await it.until(lambda: process.signals == ["kill"])
        process.end()
        assert (await it.launcher.next()).id == successor(ENGINES[0])


@in_loop
async def test_what_does_not_end_after_it_failed_is_killed(monkeypatch):
    monkeypatch.setattr(timeouts, "STOP_TIMEOUT_SECONDS", 0.05)
    async with fleet() as it:
        process = await it.launcher.next()
        process.fail(BUG)
        await it.until(lambda: process.signals[:1] == ["kill"])
        await it.until(lambda: len(process.signals) > 1)
        assert not it.launcher.has_new


@in_loop
async def test_a_users_mistake_at_the_start_ends_the_instance_at_once():
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
async def test_a_mistake_that_is_made_later_is_tried_again():
    async with fleet() as it:
        process = await it.launcher.next()
        await it.bring_up(process)
        await it.supervisor.serving.wait()
        process.end()
        process = await it.launcher.next()
        process.fail(MISTAKE)
        process.end()
        assert (await it.launcher.next()).id == successor(successor(ENGINES[0]))


@in_loop
async def test_what_is_killed_again_and_again_is_started_for_as_long_as_it_takes(monkeypatch):
    monkeypatch.setattr(timeouts, "MAX_ENGINE_DELAY_SECONDS", 0.02)
    async with fleet(data_parallel_size=2, api_server_count=1, max_engine_restarts=1) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(3)]}
        for process in processes.values():
            await it.bring_up(process)
        for blow in range(30):
            for process in processes.values():
                process.end(["it was killed by SIGKILL", "it was killed by SIGSEGV"][blow % 2])
            successors = [await it.launcher.next() for _ in processes]
            processes = {process.id: process for process in successors}
            if blow % 10 == 9:
                for process in successors:
                    await it.bring_up(process)
        assert {process.id.incarnation for process in processes.values()} == {30}
        assert not it.supervisor.failed.done()


@in_loop
async def test_a_start_that_fails_twice_for_one_cause_ends_an_instance_that_never_served():
    async with fleet(data_parallel_size=2) as it:
        first = [await it.launcher.next() for _ in range(2)]
        failing = next(process for process in first if process.id == ENGINES[0])
        failing.fail(BUG)
        failing.end("it ended with exit code 1")
        successor_of_it = await it.launcher.next()
        assert not it.supervisor.failed.done()
        successor_of_it.fail(BUG)
        with pytest.raises(EngineFailed, match="there is a bug"):
            await it.supervisor.failed


@in_loop
async def test_a_start_that_fails_twice_for_one_cause_later_is_given_up_and_the_others_serve_on():
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
async def test_who_fails_again_and_again_is_given_up_and_the_last_one_ends_the_instance():
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
async def test_an_api_server_is_replaced_and_told_which_engine_is_missing():
    async with fleet(data_parallel_size=2, api_server_count=1) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(3)]}
        for process in processes.values():
            await it.bring_up(process)
        await it.supervisor.serving.wait()
        processes[ENGINES[1]].fail(BUG)
        processes[API_SERVER].end()
        process = await it.launcher.next()
        assert process.id == successor(API_SERVER)
        client = await it.bind(process)
        assert [member.member for member in client.attach.members] == [ENGINES[0]]
        assert client.attach.missing == [Left(ENGINES[1], str(BUG), returns=True, engine=INFO)]
        client.start()
        processes[ENGINES[1]].end()
        await it.bring_up(await it.launcher.next())
        assert joined(successor(ENGINES[1]))(await client.receive())


@in_loop
async def test_the_start_of_one_whose_end_was_heard_is_no_news():
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
async def test_a_system_that_has_no_process_left_is_tried_again():
    async with fleet(data_parallel_size=1) as it:
        observer, process = await it.adopt(), await it.launcher.next()
        it.launcher.failures = [BlockingIOError(11, "Resource temporarily unavailable")] * 2
        process.end()
        assert (await observer.receive()).member == ENGINES[0]
        for member in (successor(ENGINES[0]), successor(successor(ENGINES[0]))):
            news = await observer.receive()
            assert left(member)(news)
            assert "Resource temporarily unavailable" in news.cause
        assert (await it.launcher.next()).id.incarnation == 3


@in_loop
async def test_what_the_supervisor_did_not_foresee_ends_the_instance(monkeypatch):
    async with fleet() as it:
        process = await it.launcher.next()
        monkeypatch.setattr(it.supervisor._publisher, "attach", lambda *args, **kwargs: 1 / 0)
        process.say(Bound(process.id, "ipc:///nowhere"))
        with pytest.raises(EngineFailed, match="the supervisor failed: ZeroDivisionError"):
            await it.supervisor.failed


# Clients that were not spawned


async def register(it, lease: float = 30.0) -> FakeMember:
    guest = FakeMember(it, "guest")
    guest.send(Register(guest.inbox.address, lease))
    await guest.attached()
    return guest


@in_loop
async def test_a_client_registers_and_belongs_to_the_fleet():
    async with fleet() as it:
        process = await it.launcher.next()
        engine = await it.bring_up(process)
        guest = await register(it)
        assert guest.attach.member.index >= 1_000_000
        assert guest.attach.heartbeat == b""
        assert guest.attach.members == [Joined(ENGINES[0], engine.inbox.address, INFO)]
        guest.start()
        assert await engine.receive() == Joined(guest.attach.member, guest.inbox.address)
        process.end()
        assert left(ENGINES[0])(await guest.receive())


@in_loop
async def test_a_client_that_says_nothing_any_more_has_left_and_may_come_again():
    async with fleet() as it:
        engine = await it.bring_up(await it.launcher.next())
        guest = await register(it, lease=0.3)
        guest.start()
        assert joined(guest.attach.member)(await engine.receive())
        for _ in range(10):
            guest.send(Alive(guest.attach.member))
            await asyncio.sleep(0.05)
        for member in (engine, guest):  # it is told itself
            news = await member.receive()
            assert left(guest.attach.member)(news)
            assert "0.3 s" in news.cause
        guest.send(Alive(guest.attach.member))  # too late
        former = guest.attach.member
        guest.send(Register(guest.inbox.address, 30.0))
        assert (await guest.attached()).member not in (former, ENGINES[0])


@in_loop
async def test_who_registers_again_is_somebody_else():
    async with fleet() as it:
        engine = await it.bring_up(await it.launcher.next())
        guest = await register(it)
        guest.start()
        first = guest.attach.member
        assert joined(first)(await engine.receive())
        guest.send(Register(guest.inbox.address, 30.0))
        assert (await guest.attached()).member != first
        assert left(first)(await engine.receive())


@pytest.fixture
def quick_news(monkeypatch):
    monkeypatch.setattr(timeouts, "DISCONNECT_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(timeouts, "CONNECTION_POLL_SECONDS", 0.02)


@pytest.mark.parametrize("is_engines_side", [True, False])
@in_loop
async def test_an_engine_that_a_client_and_it_cannot_reach_is_replaced(quick_news, is_engines_side):
    async with fleet(api_server_count=1) as it:
        processes = [await it.launcher.next() for _ in range(2)]
        engine, client = [await it.bring_up(process) for process in processes]
        pair = (ENGINES[0], API_SERVER) if is_engines_side else (API_SERVER, ENGINES[0])
        (engine if is_engines_side else client).send(Unreachable(*pair))
        news = await client.receive()
        assert left(ENGINES[0])(news)
        assert news.cause == f"the connection from {pair[0].label} to {pair[1].label} broke"
        assert processes[0].signals == ["kill"]
        processes[0].end()
        assert (await it.launcher.next()).id == successor(ENGINES[0])


@in_loop
async def test_a_connection_that_broke_because_somebody_left_is_no_news(quick_news):
    async with fleet(data_parallel_size=2) as it:
        observer, processes = await it.adopt(), [await it.launcher.next() for _ in range(2)]
        for process in processes:
            await it.bring_up(process)
            assert joined(process.id)(await observer.receive())
        observer.send(Unreachable(observer.attach.member, processes[0].id))
        processes[0].end()
        assert await observer.receive() == Left(processes[0].id, KILLED, returns=True)
        assert (await it.launcher.next()).id == successor(processes[0].id)
        await asyncio.sleep(0.3)
        assert not it.launcher.has_new and not processes[1].signals


@pytest.mark.parametrize("is_engines_side", [True, False])
@in_loop
async def test_a_guest_that_cannot_be_reached_leaves(quick_news, is_engines_side):
    async with fleet() as it:
        process = await it.launcher.next()
        engine, guest = await it.bring_up(process), await register(it)
        guest.start()
        me = guest.attach.member
        assert joined(me)(await engine.receive())
        pair = (ENGINES[0], me) if is_engines_side else (me, ENGINES[0])
        (engine if is_engines_side else guest).send(Unreachable(*pair))
        for member in (engine, guest):
            assert left(me)(await member.receive())
        assert not process.signals


@in_loop
async def test_a_member_that_the_supervisor_cannot_reach_is_replaced(quick_news, monkeypatch):
    async with fleet() as it:
        process = await it.launcher.next()
        await it.bring_up(process)
        broken = [[process.id]]
        monkeypatch.setattr(it.supervisor._publisher, "pop_unreachable", lambda: broken.pop() if broken else [])
        await it.until(lambda: process.signals == ["kill"])
        process.end()
        assert (await it.launcher.next()).id == successor(process.id)


@in_loop
async def test_nonsense_from_strangers_disturbs_nobody():
    async with fleet() as it:
        stranger = Outbox(lambda message: [message])
        stranger.connect("supervisor", it.address)
        for nonsense in (b"", b"hello", b"\x80", b"\xc1" * 100):
            stranger.send("supervisor", nonsense)
        confused = FakeMember(it, "confused")
        for address, lease in (("nowhere", 10.0), ("ipc://" + "x" * 1000, 10.0), (confused.inbox.address, -1.0)):
            confused.send(Register(address, lease))
        confused.send(Alive(ClientId("i", 5)))
        confused.send(Unreachable(ClientId("i", 5), EngineId("i", 77)))
        confused.send(EngineStarted(EngineId("i", 77), INFO))
        guest = await register(it)
        assert guest.attach.members == []
        assert not it.supervisor.failed.done()
        stranger.close()
