"""Engines that share experts, and the rendezvous at which the supervisor forms their group."""

from __future__ import annotations

from typing import TypeVar

import pytest
from fleet_fakes import KILLED, FakeMember, FakeProcess, Fleet, fleet, in_loop

from eagleray.fleet import timeouts
from eagleray.fleet.replica import Up
from eagleray.identity import EngineId, next_incarnation
from eagleray.messages.lifecycle import ExpertsFormed, ExpertsOpened, OpenExperts
from eagleray.messages.membership import Joined, Left
from eagleray.messages.workers import EngineOpened, GroupOpened, Topology

ENGINES = [EngineId("i", rank) for rank in range(2)]
TOGETHER = {"data_parallel_size": 2, "enable_expert_parallel": True}
SINGLE_WORKER = Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=["here"], addresses=["127.0.0.1"])

Message = TypeVar("Message")


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(timeouts, "FIRST_RESTART_DELAY_SECONDS", 0.01)


async def receive_kind(member: FakeMember, kind: type[Message]) -> Message:
    """Return the next message of that kind."""
    while not isinstance(message := await member.receive(), kind):
        pass
    return message


async def receive_open(member: FakeMember, epoch: int, missing: list[int]) -> None:
    while (await receive_kind(member, OpenExperts)) != OpenExperts(epoch, missing):
        pass


def opened(engine: EngineId, epoch: int) -> EngineOpened:
    return EngineOpened(rank=engine.rank, topology=SINGLE_WORKER, opened=[GroupOpened(store=f"{engine.label}:{epoch}")])


def open_for(member: FakeMember, epoch: int) -> None:
    assert member.attach is not None
    engine = member.attach.member
    assert isinstance(engine, EngineId)
    member.send(ExpertsOpened(engine, epoch, opened(engine, epoch)))


async def bring_up(it: Fleet) -> tuple[list[FakeProcess], list[FakeMember]]:
    """Bring up two engines that have joined one group."""
    processes = sorted([await it.launcher.next(), await it.launcher.next()], key=lambda process: process.id.rank)
    members = [await it.bind(process) for process in processes]
    for member in members:
        open_for(member, 1)
    for member in members:
        formed = await receive_kind(member, ExpertsFormed)
        assert formed.engines == [Joined(e, m.inbox.address) for e, m in zip(ENGINES, members, strict=True)]
        assert formed.members == [opened(engine, 1) for engine in ENGINES]
        member.start()
    await it.supervisor.serving.wait()
    return processes, members


@in_loop
async def test_rendezvous_all_engines_opened_sends_formed():
    async with fleet(**TOGETHER) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(2)]}
        first = await it.bind(processes[ENGINES[0]])
        await receive_open(first, 1, [0, 1])
        open_for(first, 1)
        await receive_open(first, 1, [1])
        second = await it.bind(processes[ENGINES[1]])
        await receive_open(second, 1, [1])
        open_for(second, 1)
        assert (await receive_kind(first, ExpertsFormed)) == (await receive_kind(second, ExpertsFormed))


@in_loop
async def test_rendezvous_engine_killed_forms_next_epoch_with_replacement():
    async with fleet(**TOGETHER) as it:
        processes, (first, _) = await bring_up(it)
        processes[1].end()
        assert (await receive_kind(first, Left)).member == ENGINES[1]
        await receive_open(first, 2, [0, 1])
        open_for(first, 2)
        replacement = await it.bind(await it.launcher.next())
        await receive_open(replacement, 2, [1])
        open_for(replacement, 2)
        for member in (first, replacement):
            formed = await receive_kind(member, ExpertsFormed)
            assert (formed.epoch, [one.member for one in formed.engines]) == (
                2,
                [ENGINES[0], next_incarnation(ENGINES[1])],
            )
        replacement.start()
        await it.until(lambda: isinstance(it.supervisor._state._replicas.of(next_incarnation(ENGINES[1])).state, Up))
        assert processes[0].signals == []


@in_loop
async def test_rendezvous_group_found_broken_forms_next_epoch():
    async with fleet(**TOGETHER) as it:
        _, (first, second) = await bring_up(it)
        open_for(first, 2)
        await receive_open(second, 2, [1])
        open_for(second, 2)
        assert (await receive_kind(first, ExpertsFormed)).epoch == 2


@in_loop
async def test_rendezvous_waiting_engine_has_no_start_timeout(monkeypatch):
    monkeypatch.setattr(timeouts, "START_MARGIN_SECONDS", 0.0)
    async with fleet(startup_timeout=1.0, **TOGETHER) as it:
        processes = {process.id: process for process in [await it.launcher.next() for _ in range(2)]}
        first = await it.bind(processes[ENGINES[0]])
        open_for(first, 1)
        await it.until(lambda: processes[ENGINES[1]].signals == ["kill"])
        processes[ENGINES[1]].end()
        assert (await it.launcher.next()).id == next_incarnation(ENGINES[1])
        assert processes[ENGINES[0]].signals == []


@in_loop
async def test_rendezvous_engine_given_up_ends_instance():
    async with fleet(max_engine_restarts=0, **TOGETHER) as it:
        processes, _ = await bring_up(it)
        processes[0].end()
        await it.until(it.supervisor.failed.done)
        assert KILLED in str(it.supervisor.failed.exception())
