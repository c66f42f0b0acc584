"""Slots of adapters, and the requests that use them."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_fakes import ALICE, BOB, request

from eagleray.errors import InvalidRequest
from eagleray.messages.adapters import Adapter
from eagleray.messages.steps import StepPlan, StepResult
from eagleray.scheduler.adapters import AdapterSlots
from eagleray.scheduler.scheduler import Scheduler

PROMPT = list(range(1, 12))


def adapter(name: str, number: int) -> Adapter:
    return Adapter(name=name, number=number, path=f"/{name}")


def with_adapter(request_id: str, name: str, number: int = 0, **options):
    return msgspec.structs.replace(request(request_id, PROMPT, **options), adapter=name, adapter_number=number)


def new_scheduler(num_adapter_slots: int = 2) -> Scheduler:
    return Scheduler(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        block_size=4,
        num_blocks=32,
        enable_prefix_caching=True,
        policy="fcfs",
        num_adapter_slots=num_adapter_slots,
    )


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(StepResult(step=plan.step, rows=plan.rows, token_ids=[0] * len(plan.rows)))
    return plan


def test_rows_have_the_slots_of_their_adapters():
    scheduler = new_scheduler()
    slots = {name: scheduler.adapters.allocate(adapter(name, number)).slot for number, name in enumerate("ab", 1)}
    for request_id, name in (("1", "b"), ("2", ""), ("3", "a")):
        scheduler.add(with_adapter(request_id, name))
    plan = step(scheduler)
    assert [row.adapter_slot for row in plan.new_rows] == [slots["b"], -1, slots["a"]]


def test_a_preempted_request_keeps_its_adapter():
    scheduler = new_scheduler()
    slot = scheduler.adapters.allocate(adapter("a", 1)).slot
    scheduler.add(with_adapter("1", "a", 1))
    step(scheduler)
    scheduler.adapters.retire(1)
    scheduler.preempt_all()
    assert [row.adapter_slot for row in step(scheduler).new_rows] == [slot]


def test_stats_name_adapters_of_running_and_waiting_requests():
    scheduler = new_scheduler(num_adapter_slots=4)
    for number, name in enumerate("aba", 1):
        scheduler.adapters.allocate(adapter(name, number))
    assert (scheduler.stats().running_adapters, scheduler.stats().waiting_adapters) == ((), ())
    for request_id, (name, number) in enumerate([("b", 2), ("a", 1), ("a", 3)]):
        scheduler.add(with_adapter(str(request_id), name, number))
    assert (scheduler.stats().running_adapters, scheduler.stats().waiting_adapters) == ((), ("a", "b"))
    step(scheduler)
    assert (scheduler.stats().running_adapters, scheduler.stats().waiting_adapters) == (("a", "b"), ())
    scheduler.preempt_all()
    scheduler.abort(ALICE, ["0"])
    assert (scheduler.stats().running_adapters, scheduler.stats().waiting_adapters) == ((), ("a",))


def test_prefixes_are_shared_only_within_a_load_of_an_adapter():
    scheduler = new_scheduler(3)
    for number, name in ((1, "a"), (2, "b")):
        scheduler.adapters.allocate(adapter(name, number))

    def num_computed(request_id: str, name: str) -> int:
        scheduler.add(with_adapter(request_id, name, max_tokens=1))
        (row,) = step(scheduler).new_rows
        return row.num_computed_tokens

    assert num_computed("1", "a") == 0
    assert num_computed("2", "a") == 8
    assert num_computed("3", "b") == 0
    assert num_computed("4", "") == 0
    scheduler.adapters.retire(1)
    scheduler.adapters.allocate(adapter("a", 3))
    assert num_computed("5", "a") == 0
    scheduler.set_weights(update=1, version="v1")
    assert num_computed("6", "a") == 0
    assert num_computed("7", "a") == 8
    assert num_computed("8", "b") == 0


@pytest.mark.parametrize("how", ["finish", "abort", "abort client"])
def test_a_retired_slot_is_free_when_its_last_request_ends(how):
    scheduler = new_scheduler(1)
    slots = scheduler.adapters
    slots.allocate(adapter("a", 1))
    scheduler.add(with_adapter("1", "a", client=ALICE, max_tokens=2))
    scheduler.add(with_adapter("2", "a", client=BOB, max_tokens=1))
    slots.retire(1)
    step(scheduler)  # the second request finishes
    assert not slots.has_free
    if how == "finish":
        step(scheduler)
    elif how == "abort":
        scheduler.abort(ALICE, ["1"])
    else:
        scheduler.abort_client(ALICE)
    assert slots.has_free and 1 not in slots


def test_request_of_another_number_gets_the_current_adapter_of_the_name():
    slots = AdapterSlots(3)
    old, other = slots.allocate(adapter("a", 1)), slots.allocate(adapter("b", 2))
    slots.retain(old)
    slots.retire(1)
    new = slots.allocate(adapter("a", 3))
    assert slots.find("a", 1) is old, "a request of that load may still have it"
    assert slots.find("a", 3) is new
    assert slots.find("a", 0) is new
    assert slots.find("a", 2) is new, "the number of another adapter"
    assert slots.find("b", 2) is other


def test_request_for_an_adapter_that_is_not_there_says_why():
    scheduler = new_scheduler()
    with pytest.raises(InvalidRequest, match="adapter 'a' cannot be used: it is not loaded, or was unloaded"):
        scheduler.add(with_adapter("1", "a", 7))
    scheduler.adapters.set_missing("a", "its files are gone")
    with pytest.raises(InvalidRequest, match="its files are gone"):
        scheduler.add(with_adapter("1", "a", 7))
    assert scheduler.num_requests == 0
    scheduler.adapters.allocate(adapter("a", 8))
    scheduler.add(with_adapter("1", "a", 7))


def test_retire_others_keeps_what_is_named():
    slots = AdapterSlots(2)
    slots.allocate(adapter("a", 1))
    slots.allocate(adapter("b", 2))
    slots.set_missing("c", "reason")
    slots.retire_others([adapter("b", 2)])
    assert 2 in slots and 1 not in slots
    with pytest.raises(InvalidRequest, match="it is not loaded"):
        slots.find("c", 3)
