"""Order of the waiting queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from scheduler_fakes import request

from eagleray.scheduler.request import new_request
from eagleray.scheduler.waiting import WaitingQueue


def waiting(arrival, priority=0):
    return new_request(request(f"r{arrival}", [1]), priority=priority, arrival=arrival, max_model_len=8, vocab_size=16)


def drain(queue):
    return [queue.pop().arrival for _ in range(len(queue))]


def test_waiting_queue_equal_priorities_are_first_come_first_served():
    queue = WaitingQueue()
    for arrival in range(4):
        queue.push(waiting(arrival))
    assert drain(queue) == [0, 1, 2, 3]


def test_waiting_queue_priorities_lower_number_first_then_arrival():
    queue = WaitingQueue()
    for arrival, priority in enumerate([5, -1, 5, 0, -1]):
        queue.push(waiting(arrival, priority))
    assert drain(queue) == [1, 4, 3, 0, 2]


def test_waiting_queue_preempted_request_returns_to_front():
    queue = WaitingQueue()
    for arrival, priority in enumerate([1, 1, 1, 0]):
        queue.push(waiting(arrival, priority))
    queue.pop()
    preempted = queue.pop()
    queue.push(preempted)
    assert preempted.arrival == 0 and drain(queue) == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans())))
def test_waiting_queue_removed_request_is_never_popped(entries):
    queue = WaitingQueue()
    requests = [waiting(arrival, priority) for arrival, (priority, _) in enumerate(entries)]
    for item in requests:
        queue.push(item)
    for item, (_, removed) in zip(requests, entries, strict=True):
        if removed:
            queue.remove(item)
    kept = [item for item, (_, removed) in zip(requests, entries, strict=True) if not removed]
    assert len(queue) == len(kept)
    assert drain(queue) == [item.arrival for item in sorted(kept, key=lambda r: (r.priority, r.arrival))]
