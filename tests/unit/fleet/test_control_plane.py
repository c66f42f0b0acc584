"""Control calls through the supervisor: a client's message, the engines' replies, the answer, over real sockets."""

from __future__ import annotations

import pytest
from fleet_fakes import INFO, FakeMember, fleet, in_loop, joined

from eagleray.config.resolve import DEMO_MODEL_DIR
from eagleray.fleet import timeouts
from eagleray.fleet.replica import Up
from eagleray.identity import ClientId, EngineId
from eagleray.messages.control import (
    AbortRequests,
    Command,
    CommandDone,
    ControlCall,
    ControlReturned,
    FetchWeights,
    InstanceState,
    Pause,
    Resume,
    SetState,
    StateChanged,
)
from eagleray.messages.lifecycle import EngineStarted
from eagleray.messages.plain import unpack

PAUSED = InstanceState(pause="keep")


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(timeouts, "FIRST_RESTART_DELAY_SECONDS", 0.01)


def call(client: FakeMember, request, *, call_id=1, timeout=20.0):
    client.send(
        ControlCall(
            client=client.attach.member, call_id=call_id, operation_id=str(call_id), request=request, timeout=timeout
        )
    )


async def receive(member: FakeMember, kind):
    """Return the next message of this kind."""
    while not isinstance(message := await member.receive(), kind):
        pass
    return message


async def execute(member: FakeMember, **result) -> Command:
    """Receive a command and reply to it."""
    command = await receive(member, Command)
    member.send(CommandDone(member=member.attach.member, number=command.number, result=result))
    return command


@in_loop
async def test_control_plane_pause_sets_the_state_of_all_engines_and_answers():
    async with fleet(data_parallel_size=2) as it:
        client = await it.adopt()
        engines = [await it.bring_up(await it.launcher.next()) for _ in range(2)]
        call(client, Pause(mode="keep"))
        for engine in engines:
            assert (await execute(engine, num_kept=3)).body == SetState(state=PAUSED)
        assert await receive(client, StateChanged) == StateChanged(PAUSED)
        answer = await receive(client, ControlReturned)
        assert unpack(answer.answer) == {"status": "paused", "num_kept": 6, "num_aborted": 0}


@in_loop
async def test_control_plane_engine_killed_in_a_pause_successor_is_attached_paused_and_joins():
    async with fleet() as it:
        client, process = await it.adopt(), await it.launcher.next()
        await it.bring_up(process)
        call(client, Pause(mode="keep"))
        process.end()  # before it has replied
        assert unpack((await receive(client, ControlReturned)).answer)["status"] == "paused"
        replacement = await it.launcher.next()
        engine = await it.bring_up(replacement)
        assert engine.attach.state == PAUSED
        while not joined(replacement.id)(await client.receive()):
            pass


@in_loop
async def test_control_plane_state_changed_during_start_engine_joins_when_it_has_adopted_it():
    async with fleet() as it:
        client, process = await it.adopt(), await it.launcher.next()
        engine = await it.bind(process)
        assert engine.attach.state == InstanceState()
        call(client, Pause(mode="keep"))
        assert unpack((await receive(client, ControlReturned)).answer)["status"] == "paused"
        engine.start()
        command = await receive(engine, Command)
        assert command.body == SetState(state=PAUSED)
        call(client, Resume(), call_id=2)
        command_2 = await receive(engine, Command)
        assert not it.supervisor.serving.is_set()
        for number in (command.number, command_2.number):
            engine.send(CommandDone(member=process.id, number=number))
        while not joined(process.id)(await client.receive()):
            pass


@in_loop
async def test_control_plane_engine_without_the_weights_that_are_required_joins_when_it_has_them():
    async with fleet() as it:
        client, process = await it.adopt(), await it.launcher.next()
        engine = await it.bind(process)
        engine.send(EngineStarted(process.id, INFO, update=5))
        await it.until(lambda: isinstance(it.supervisor._state._replicas.of(process.id).state, Up))
        command = await receive(engine, Command)
        assert command.body == FetchWeights(update=0, weight_dir=str(DEMO_MODEL_DIR))
        assert not it.supervisor.serving.is_set()
        engine.send(CommandDone(member=process.id, number=command.number, result={"update": 0}))
        while not joined(process.id)(await client.receive()):
            pass


@in_loop
async def test_control_plane_successor_without_weights_serves_again_only_when_it_has_them(caplog):
    caplog.set_level("INFO", logger="eagleray")
    async with fleet() as it:
        client, process = await it.adopt(), await it.launcher.next()
        await it.bring_up(process)
        process.end()
        successor = await it.launcher.next()
        engine = await it.bind(successor)
        engine.send(EngineStarted(successor.id, INFO, update=5))
        command = await receive(engine, Command)
        assert "engine-0.1 has started; it serves when it has the weights of update 0" in caplog.text
        assert "serves again" not in caplog.text
        engine.send(CommandDone(member=successor.id, number=command.number, result={"update": 0}))
        while not joined(successor.id)(await client.receive()):
            pass
        assert "engine-0.1 serves again after" in caplog.text


@in_loop
async def test_control_plane_engine_does_not_reply_deadline_names_it():
    async with fleet() as it:
        client = await it.adopt()
        await it.bring_up(await it.launcher.next())
        call(client, Pause(mode="keep"), timeout=0.2)
        answer = await receive(client, ControlReturned)
        assert answer.failure.kind == "DeadlineExceeded"
        assert answer.failure.message == "pause: time limit reached: engine-0 has not replied"


@in_loop
async def test_control_plane_abort_requests_is_executed_by_clients():
    async with fleet(api_server_count=1) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(2)]}
        server = await it.bring_up(processes[ClientId("i", 0)])
        await it.bring_up(processes[EngineId("i", 0)])
        client = await it.adopt()
        call(client, AbortRequests(request_ids=["a"]))
        for member in (client, server):
            assert (await execute(member, aborted=2)).body == AbortRequests(request_ids=["a"])
        assert unpack((await receive(client, ControlReturned)).answer) == {"status": "aborted", "aborted": 4}
