"""Engines that share experts, and the rendezvous at which the fleet forms their group."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import pytest
from fleet_machine import KILLED, OBSERVER, Machine, later
from fleet_world import CAUSES, SINGLE_WORKER, World
from msgspec.structs import replace

from eagleray.fleet import timeouts
from eagleray.fleet.events import StartEngines
from eagleray.identity import EngineId
from eagleray.messages.control import InitWeightTransfer, Pause, Resume
from eagleray.messages.lifecycle import ExpertsBroken, ExpertsFormed, ExpertsJoined, ExpertsOpened, OpenExperts
from eagleray.messages.membership import Joined
from eagleray.messages.scaling import GetScaling, Scale
from eagleray.messages.steps import EngineOpened, GroupOpened

E = [EngineId("i", rank) for rank in range(2)]

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
    assert last(it, E[0], OpenExperts) == OpenExperts(1, [0, 1], [0, 1])
    open_for(it, E[0], 1)
    assert last(it, E[0], OpenExperts) == OpenExperts(1, [0, 1], [1])
    it.bind(E[1])
    assert last(it, E[1], OpenExperts) == OpenExperts(1, [0, 1], [1])
    open_for(it, E[1], 1)
    formed = ExpertsFormed(1, [Joined(engine, f"of {engine.label}") for engine in E], [opened(e, 1) for e in E])
    assert [last(it, engine, ExpertsFormed) for engine in E] == [formed, formed]


def test_rendezvous_engine_killed_forms_next_epoch_with_replacement():
    it = serving()
    it.exit(E[1])
    assert last(it, E[0], OpenExperts) == OpenExperts(2, [0, 1], [0, 1])
    open_for(it, E[0], 2)
    it.pass_time(0.0)
    it.bind(later(E[1]))
    assert last(it, later(E[1]), OpenExperts) == OpenExperts(2, [0, 1], [1])
    open_for(it, later(E[1]), 2)
    for engine in (E[0], later(E[1])):
        formed = last(it, engine, ExpertsFormed)
        assert (formed.epoch, [one.member for one in formed.engines]) == (2, [E[0], later(E[1])])
    it.start(later(E[1]))
    assert it.is_up(later(E[1]))
    assert it.running[E[0]] == []


def test_rendezvous_group_found_broken_forms_next_epoch():
    it = serving()
    it.handle(ExpertsBroken(E[0], 1))
    open_for(it, E[0], 2)
    assert last(it, E[1], OpenExperts) == OpenExperts(2, [0, 1], [1])
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


# Scaling.


def scaling(request: Scale, *, num_engines: int = 2, **options: object) -> tuple[World, int]:
    """Return a fleet whose engines share experts and in which a scaling operation has begun, and the call's number."""
    world = World(data_parallel_size=num_engines, enable_expert_parallel=True, **options)
    world.boot()
    world.group_messages.clear()
    return world, world.send_call(OBSERVER, request, "scale", 600.0)


def run_until(world: World, is_reached: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_reached():
            return
        if not world._do_something():
            world.pass_time(max(0.0, world.state.deadline - world.now))
    raise AssertionError("it is never reached")


def epochs(world: World) -> list[tuple[list[int], list[int]]]:
    """Return the ranks, and those that leave, of each epoch that was formed."""
    found = {}
    for messages in world.received.values():
        for message in messages:
            if isinstance(message, ExpertsFormed):
                found[message.epoch] = [one.rank for one in message.members], message.leaving
    return [found[epoch] for epoch in sorted(found)]


def phase(world: World) -> str:
    return world.outcome(world.send_call(OBSERVER, GetScaling(), None, 1.0))["phase"]


def test_scale_expert_group_added_engines_join_when_all_have_loaded():
    it, call = scaling(Scale(num_engines=4))
    added = [EngineId("i", rank) for rank in (2, 3)]
    assert it.state.expert_group_size == 4, "added engines read no experts"
    assert it.state.engine_config(added[0]).parallel.data_parallel_size == 4
    it.bind(added[0])
    it.bind(added[1])
    it.advance(added[0])
    assert (it.group_messages, phase(it)) == ({}, "preparing"), "the group serves on"
    it.advance(added[1])
    assert all(it.group_messages[engine] == OpenExperts(2, [0, 1, 2, 3], [0, 1, 2, 3]) for engine in [*E, *added])
    assert phase(it) == "committing"
    it.settle()
    it.check_settled()
    assert it.outcome(call)["participating_ranks"] == [0, 1, 2, 3]
    assert epochs(it) == [([0, 1], []), ([0, 1, 2, 3], [])]


def test_scale_expert_group_leaving_engine_hands_over_its_experts_first():
    it, call = scaling(Scale(remove_ranks=(0,)), num_engines=3)
    run_until(it, lambda: it.opened_epochs.values() and set(it.joined_epochs.values()) == {2})
    assert it.group_messages[EngineId("i", 2)] == OpenExperts(3, [1, 2], [1, 2])
    assert E[0] in it.told_to_stop
    it.settle()
    it.check_settled()
    assert it.outcome(call)["participating_ranks"] == [1, 2]
    assert epochs(it) == [([0, 1, 2], []), ([0, 1, 2], [0]), ([1, 2], [])]
    it.end(EngineId("i", 2), CAUSES["signal"])
    assert it.state.expert_group_size == 2, "its replacement gets what is left of its experts"
    it.settle()
    it.check_settled()


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("request_", [Scale(num_engines=3), Scale(num_engines=2, remove_ranks=(0,))])
def test_scale_expert_group_engine_killed_at_any_time_completes(request_, victim):
    """The engine is killed after each of the steps of the operation in turn."""
    for moment in itertools.count():
        it, call = scaling(request_)
        count = itertools.count()
        run_until(it, lambda: next(count) == moment or call in it.answers)  # noqa: B023
        if call in it.answers:
            assert moment >= 8, "an engine binds and loads, then three open and join"
            return
        for member in [member for member in it.running if member == EngineId("i", victim, member.incarnation)]:
            it.end(member, CAUSES["signal"])
        it.settle()
        it.check_settled()
        assert it.outcome(call)["phase"] == "completed"
        is_named = bool(request_.remove_ranks)
        assert it.outcome(call)["participating_ranks"] == ([1, 2] if is_named else [0, 1, 2])


def test_scale_expert_group_missing_engine_is_removed_without_its_replacement():
    it, _ = scaling(Scale(num_engines=2))
    it.settle()
    it.end(E[0], CAUSES["signal"])
    call = it.send_call(OBSERVER, Scale(remove_ranks=(0,)), "remove", 600.0)
    assert it.group_messages[E[1]] == OpenExperts(3, [1], [1])
    it.settle()
    it.check_settled()
    assert it.outcome(call)["participating_ranks"] == [1]


def test_scale_expert_group_call_that_waits_for_added_engine_does_not_delay_it():
    it, call = scaling(Scale(num_engines=3))
    transfer = it.send_call(OBSERVER, InitWeightTransfer(init_info={}), "init", 600.0)
    it.settle()
    assert it.now < 100.0
    assert (it.outcome(call)["phase"], isinstance(it.outcome(transfer), dict)) == ("completed", True)


def test_scale_expert_group_added_engine_given_up_others_hand_over_to_the_former():
    """One of two added engines has an error of its own after both have got experts: nothing of the operation is left,
    and the experts of the other one go back."""
    it, call = scaling(Scale(num_engines=4), max_engine_restarts=0)
    added = EngineId("i", 3)
    run_until(it, lambda: it.joined_epochs[EngineId("i", 2)] == 2)
    assert it.joined_epochs[added] < 2
    it.end(added, CAUSES["bug"])
    it.settle()
    it.check_settled()
    assert "there is a bug" in str(it.outcome(call))
    assert epochs(it)[-2:] == [([0, 1, 2], [2]), ([0, 1], [])]


def test_scale_expert_group_others_lack_memory_fails_and_all_stay():
    it, call = scaling(Scale(num_engines=1, drain_timeout=5.0))
    run_until(it, lambda: set(it.opened_epochs.values()) == {2})
    it.joined_epochs[E[0]] = 2
    it.handle(ExpertsJoined(E[0], 2, "there is no room"))
    it.settle()
    it.check_settled()
    assert "engine-0: there is no room" in str(it.outcome(call))
    assert it.up_ranks() == [0, 1]
    assert not it.draining, "clients would avoid an engine that stays"


def test_scale_expert_group_waits_for_calls_and_they_for_it():
    it, call = scaling(Scale(num_engines=3))
    added = EngineId("i", 2)
    pause = it.send_call(OBSERVER, Pause(mode="keep"), "pause", 600.0)
    it.bind(added)
    it.advance(added)
    assert it.group_messages == {}
    for member in list(it.commands):
        while it.commands[member]:
            it.execute_next(member)
    assert pause in it.answers
    assert it.group_messages[added].epoch == 2
    resume = it.send_call(OBSERVER, Resume(), "resume", 600.0)
    assert not any(it.commands.values()), "no memory changes while experts are exchanged"
    it.settle()
    assert (it.outcome(resume)["status"], it.outcome(call)["phase"]) == ("resumed", "completed")


@pytest.mark.parametrize("is_lost", [False, True])
def test_scale_expert_group_calls_wait_between_the_epochs_of_a_removal(is_lost):
    it, call = scaling(Scale(remove_ranks=(0,), drain_timeout=30.0), num_engines=3)
    run_until(it, lambda: it.state._experts._rendezvous.epoch == 2 and it.state._experts._rendezvous.is_settled)
    pause = it.send_call(OBSERVER, Pause(mode="keep"), "pause", 600.0)
    if is_lost:
        it.end(E[0], CAUSES["signal"])
    run_until(it, lambda: it.state._experts._rendezvous.epoch == 3)
    assert it.state._experts._rendezvous.ranks == [1, 2]
    while not it.state._experts._rendezvous.is_settled:
        assert not any(it.commands.values()), "engines have experts to exchange"
        run_until(it, lambda: it._do_something() or True)
    it.settle()
    it.check_settled()
    assert (it.outcome(pause)["status"], it.outcome(call)["phase"]) == ("paused", "completed")


def test_scale_expert_group_removal_does_not_wait_for_ever_for_a_call():
    it, _ = scaling(Scale(num_engines=2))
    it.settle()
    pause = it.send_call(OBSERVER, Pause(mode="keep"), "pause", 10_000.0)
    call = it.send_call(OBSERVER, Scale(num_engines=1), "scale down", 10_000.0)
    status = it.outcome(it.send_call(OBSERVER, GetScaling(), None, 1.0))
    assert status["waiting_for"] == "pause (operation pause) must end"
    it.pass_time(timeouts.REGROUP_WAIT_SECONDS)
    assert "could not hand over experts for 600 s: pause (operation pause) must end" in str(it.outcome(call))
    it.settle()
    it.check_settled()
    assert (it.outcome(pause)["status"], it.up_ranks()) == ("paused", [0, 1])


def test_scale_expert_group_experts_do_not_move_in_time_engines_stay():
    it, call = scaling(Scale(num_engines=1), startup_timeout=10.0)
    pause = it.send_call(OBSERVER, Pause(mode="keep"), "pause", 5.0)
    it.pass_time(5.0)
    assert "it waits for engines that exchange experts" in str(it.outcome(pause))
    it.pass_time(timeouts.SCALE_START_ATTEMPTS * (10.0 + timeouts.START_MARGIN_SECONDS))
    it.settle()
    it.check_settled()
    assert "the experts of engine-1 did not move to others within 50 s" in str(it.outcome(call))
    assert it.up_ranks() == [0, 1]
    assert epochs(it)[-1] == ([0, 1], [])


def test_scale_expert_group_refusals_have_a_sentence():
    it = Machine.serving(enable_expert_parallel=True)
    assert "start with `data_parallel_size` 2 or more" in it.answer(it.call(Scale(num_engines=2))).message
    world, _ = scaling(Scale(num_engines=2))
    instance = world.state._control._instance
    instance.state = replace(instance.state, update=1)
    assert "an added engine would read" in str(world.outcome(world.send_call(OBSERVER, Scale(num_engines=3), "a", 1.0)))
    instance.state = replace(instance.state, asleep=("weights",))
    assert "wake_up" in str(world.outcome(world.send_call(OBSERVER, Scale(num_engines=1), "b", 1.0)))
