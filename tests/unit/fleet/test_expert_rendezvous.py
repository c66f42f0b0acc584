from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagleray.fleet.expert_rendezvous import ExpertRendezvous
from eagleray.identity import EngineId, next_incarnation
from eagleray.messages.lifecycle import ExpertsFormed, OpenExperts
from eagleray.messages.workers import EngineOpened, GroupOpened, Topology

SINGLE_WORKER = Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=["here"], addresses=["127.0.0.1"])
ENGINES = [EngineId("i", rank) for rank in range(3)]


def opened(engine: EngineId) -> EngineOpened:
    return EngineOpened(rank=engine.rank, topology=SINGLE_WORKER, opened=[GroupOpened(store=engine.label)])


def complete(group: ExpertRendezvous, *engines: EngineId) -> None:
    for engine in engines:
        assert group.open(engine, group.epoch, opened(engine))
    assert group.is_complete


def test_rendezvous_open_by_all_is_complete():
    group = ExpertRendezvous(range(3))
    assert group.open_message == OpenExperts(1, [0, 1, 2], [0, 1, 2])
    for engine in (ENGINES[2], ENGINES[0]):
        assert group.open(engine, 1, opened(engine))
    assert not group.is_complete
    assert group.open_message == OpenExperts(1, [0, 1, 2], [1])
    assert group.open(ENGINES[1], 1, opened(ENGINES[1]))
    assert group.is_complete and not group.is_settled
    assert group.engines == ENGINES
    assert group.formed_message([]) == ExpertsFormed(1, [], [opened(engine) for engine in ENGINES])
    for engine in ENGINES:
        group.join(engine, 1)
    assert group.is_settled


def test_rendezvous_remove_opened_engine_begins_next_epoch():
    group = ExpertRendezvous(range(2))
    complete(group, *ENGINES[:2])
    group.remove(ENGINES[1])
    assert group.open_message == OpenExperts(2, [0, 1], [0, 1])
    complete(group, ENGINES[0], next_incarnation(ENGINES[1]))
    assert group.engines == [ENGINES[0], next_incarnation(ENGINES[1])]


def test_rendezvous_remove_unopened_engine_changes_nothing():
    group = ExpertRendezvous(range(2))
    group.open(ENGINES[0], 1, opened(ENGINES[0]))
    group.remove(ENGINES[1])
    assert group.open_message == OpenExperts(1, [0, 1], [1])
    complete(group, next_incarnation(ENGINES[1]))
    group.remove(ENGINES[1])  # an earlier incarnation
    assert group.is_complete


def test_rendezvous_group_found_broken_begins_next_epoch_once():
    group = ExpertRendezvous(range(2))
    complete(group, *ENGINES[:2])
    assert group.mark_broken(ENGINES[0], 1)
    assert not group.mark_broken(ENGINES[1], 1)
    assert group.open(ENGINES[0], 2, opened(ENGINES[0]))
    assert group.open_message == OpenExperts(2, [0, 1], [1])
    group.remove(ENGINES[1])  # engine 0 noticed it first
    assert group.open_message == OpenExperts(2, [0, 1], [1])
    assert not group.open(next_incarnation(ENGINES[1]), 1, opened(next_incarnation(ENGINES[1])))
    complete(group, next_incarnation(ENGINES[1]))


def test_rendezvous_regroup_waits_for_its_ranks_only():
    group = ExpertRendezvous(range(2))
    complete(group, *ENGINES[:2])
    group.regroup([0, 1, 2])
    assert (group.open_message, group.is_settled) == (OpenExperts(2, [0, 1, 2], [0, 1, 2]), False)
    complete(group, *ENGINES)
    group.regroup([0, 1, 2], leaving=[0])
    complete(group, *ENGINES)
    assert group.formed_message([]).leaving == [0]
    group.remove(ENGINES[0], returns=False)
    assert (group.open_message, group.leaving) == (OpenExperts(4, [1, 2], [1, 2]), [])
    assert not group.open(ENGINES[0], 4, opened(ENGINES[0]))
    complete(group, *ENGINES[1:])


EVENTS = st.lists(st.tuples(st.sampled_from(["open", "break", "lose"]), st.integers(0, 2)), max_size=40)


@given(EVENTS)
def test_rendezvous_any_events_contains_present_engines_only(events):
    group, there = ExpertRendezvous(range(3)), list(ENGINES)
    epochs = [0, 0, 0]  # the last epoch that each engine opened for
    for kind, rank in events:
        engine = there[rank]
        if kind == "lose":
            group.remove(engine)
            there[rank], epochs[rank] = next_incarnation(engine), 0
        elif kind == "break" and engine in group.engines:
            assert group.mark_broken(engine, epochs[rank])
        else:
            epochs[rank] = group.epoch
            group.open(engine, epochs[rank], opened(engine))
        assert set(group.engines) <= set(there)
        assert all(epochs[one.rank] == group.epoch for one in group.engines)
        assert group.is_complete == (group.open_message.missing == [])
