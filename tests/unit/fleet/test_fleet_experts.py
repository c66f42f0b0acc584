"""Engines that share experts, and the rendezvous at which the fleet forms their group."""

from __future__ import annotations

from typing import TypeVar

from fleet_machine import KILLED, Machine, later

from eagleray.fleet import timeouts
from eagleray.fleet.events import StartEngines
from eagleray.identity import EngineId
from eagleray.messages.lifecycle import ExpertsFormed, ExpertsOpened, OpenExperts
from eagleray.messages.membership import Joined
from eagleray.messages.steps import EngineOpened, GroupOpened
from eagleray.messages.workers import Topology

E = [EngineId("i", rank) for rank in range(2)]
SINGLE_WORKER = Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=["here"], addresses=["127.0.0.1"])

Message = TypeVar("Message")


def starting(**options: object) -> Machine:
    machine = Machine(data_parallel_size=2, enable_expert_parallel=True, **options)
    machine.handle(StartEngines((0, 1)))
    machine.adopt()
    return machine


def serving(**options: object) -> Machine:
    """Return a machine with two engines that have joined one group."""
    machine = starting(**options)
    for engine in E:
        machine.bind(engine)
    for engine in E:
        open_for(machine, engine, 1)
    for engine in E:
        machine.start(engine)
    assert machine.is_serving
    return machine


def opened(engine: EngineId, epoch: int) -> EngineOpened:
    return EngineOpened(rank=engine.rank, topology=SINGLE_WORKER, opened=[GroupOpened(store=f"{engine.label}:{epoch}")])


def open_for(machine: Machine, engine: EngineId, epoch: int) -> None:
    machine.handle(ExpertsOpened(engine, epoch, opened(engine, epoch)))


def last(machine: Machine, engine: EngineId, kind: type[Message]) -> Message:
    return [message for message in machine.received[engine] if isinstance(message, kind)][-1]


def test_rendezvous_all_engines_opened_sends_formed():
    it = starting()
    it.bind(E[0])
    assert last(it, E[0], OpenExperts) == OpenExperts(1, [0, 1])
    open_for(it, E[0], 1)
    assert last(it, E[0], OpenExperts) == OpenExperts(1, [1])
    it.bind(E[1])
    assert last(it, E[1], OpenExperts) == OpenExperts(1, [1])
    open_for(it, E[1], 1)
    formed = ExpertsFormed(1, [Joined(engine, f"of {engine.label}") for engine in E], [opened(e, 1) for e in E])
    assert [last(it, engine, ExpertsFormed) for engine in E] == [formed, formed]


def test_rendezvous_engine_killed_forms_next_epoch_with_replacement():
    it = serving()
    it.exit(E[1])
    assert last(it, E[0], OpenExperts) == OpenExperts(2, [0, 1])
    open_for(it, E[0], 2)
    it.pass_time(0.0)
    it.bind(later(E[1]))
    assert last(it, later(E[1]), OpenExperts) == OpenExperts(2, [1])
    open_for(it, later(E[1]), 2)
    for engine in (E[0], later(E[1])):
        formed = last(it, engine, ExpertsFormed)
        assert (formed.epoch, [one.member for one in formed.engines]) == (2, [E[0], later(E[1])])
    it.start(later(E[1]))
    assert it.is_up(later(E[1]))
    assert it.running[E[0]] == []


def test_rendezvous_group_found_broken_forms_next_epoch():
    it = serving()
    open_for(it, E[0], 2)
    assert last(it, E[1], OpenExperts) == OpenExperts(2, [1])
    open_for(it, E[1], 2)
    assert last(it, E[0], ExpertsFormed).epoch == 2


def test_rendezvous_waiting_engine_has_no_start_timeout():
    it = starting(startup_timeout=10.0)
    it.bind(E[0])
    open_for(it, E[0], 1)
    it.pass_time(10.0 + timeouts.START_MARGIN_SECONDS)
    assert it.running == {E[0]: [], E[1]: ["kill"]}
    it.exit(E[1])
    it.pass_time(0.0)
    assert it.spawned[-1] == later(E[1])


def test_rendezvous_engine_given_up_ends_instance():
    it = serving(max_engine_restarts=0)
    it.exit(E[0])
    assert KILLED in str(it.error)
