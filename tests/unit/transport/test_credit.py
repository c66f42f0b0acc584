from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.errors import ChannelClosed
from eagleray.transport.credit import Flow, Kind

WINDOW = 1000


class End:
    """A flow, the messages it has still to send, and the messages in flight to it."""

    def __init__(self, sizes: list[int]) -> None:
        self.flow = Flow(WINDOW)
        self.to_send = deque(sizes)
        self.mail: deque[tuple[bytes, int]] = deque()
        self.waiting: deque[int] = deque()  # arrived, not yet taken by the user
        self.taken: list[int] = []
        self.other: End

    def send(self) -> bool:
        if not self.to_send or not self.flow.fits(self.to_send[0]):
            return False
        size = self.to_send.popleft()
        self.other.mail.append((self.flow.send(size), size))
        return True

    def arrive(self) -> bool:
        if not self.mail:
            return False
        header, size = self.mail.popleft()
        if self.flow.on_arrival(header) == Kind.DATA:
            self.waiting.append(size)
        return True

    def take(self) -> bool:
        if not self.waiting:
            return False
        self.taken.append(self.waiting.popleft())
        if header := self.flow.consume(self.taken[-1]):
            self.other.mail.append((header, 0))
        return True

    def under_way(self) -> list[int]:
        """Return the sizes sent and not yet consumed by the other side."""
        return [size for _, size in self.other.mail if size] + [size for size in self.other.waiting if size]


sizes = st.lists(st.one_of(st.integers(0, 100), st.integers(0, 3 * WINDOW)), max_size=40)


@given(sizes, sizes, st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=300))
def test_flow_random_turns_window_bounds_bytes_in_flight(here, there, turns):
    a, b = End(here), End(there)
    a.other, b.other = b, a

    def step(end: End, action: int) -> bool:
        done = (end.send, end.arrive, end.take)[action]()
        under_way = end.under_way()
        assert sum(min(size, WINDOW * 3 // 4) for size in under_way) <= WINDOW
        assert sum(size > WINDOW // 2 for size in under_way) <= 1
        return done

    for first, action in turns:
        step(a if first else b, action)
    while any(step(end, action) for end in (a, b) for action in range(3)):
        pass
    assert (a.taken, b.taken) == (there, here)


def test_flow_message_is_acknowledged_when_consumed():
    sender, receiver = Flow(WINDOW), Flow(WINDOW)
    header = sender.send(600)
    receiver.on_arrival(header)
    sender.on_arrival(receiver.control(Kind.CREDIT))
    assert not sender.fits(600)
    sender.on_arrival(receiver.consume(600))
    assert sender.fits(600)


def test_flow_reply_acknowledges_consumed_bytes():
    sender, receiver = Flow(WINDOW), Flow(WINDOW)
    receiver.on_arrival(sender.send(200))
    receiver.on_arrival(sender.send(200))
    assert receiver.consume(200) is None  # too little to say so at once
    assert not sender.fits(700)
    sender.on_arrival(receiver.send(1))
    assert sender.fits(700)


def test_flow_missing_message_error_names_it():
    sender, receiver = Flow(WINDOW), Flow(WINDOW)
    receiver.on_arrival(sender.send(1))
    sender.send(1)
    with pytest.raises(ChannelClosed, match=r"message 3 .* message 2"):
        receiver.on_arrival(sender.send(1))


def test_flow_bye_marks_the_other_side_ended():
    flow = Flow(WINDOW)
    assert not flow.ended
    flow.on_arrival(Flow(WINDOW).control(Kind.BYE))
    assert flow.ended
