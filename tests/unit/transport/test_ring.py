from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.errors import ChannelClosed
from eagleray.transport.ring import WANTED, RingMemory, RingReader, RingWriter, control_bytes

CAPACITY = 1024  # records of 64 bytes at most
LARGE = CAPACITY // 2


def make_memory(num_readers: int, capacity: int = CAPACITY) -> RingMemory:
    control = memoryview(bytearray(control_bytes(num_readers))).cast("Q")
    data = memoryview(bytearray(capacity))
    return RingMemory(control=control, words=data.cast("Q"), data=data, wanted=control[WANTED : WANTED + 1])


def contents(frames: Sequence[bytes]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


sizes = st.one_of(st.integers(0, 40), st.integers(0, 3 * CAPACITY))
messages = st.lists(st.lists(sizes, min_size=1, max_size=6), max_size=30)


@given(messages, st.integers(1, 4), st.lists(st.integers(0, 4), max_size=400))
def test_ring_random_turns_every_reader_gets_all_in_order(all_sizes, num_readers, turns):
    sent = [
        [bytes((7 * number + 3 * index + i) % 251 for i in range(size)) for index, size in enumerate(message)]
        for number, message in enumerate(all_sizes)
    ]
    memory = make_memory(num_readers)
    writer = RingWriter(memory, range(num_readers))
    readers = [RingReader(memory, reader) for reader in range(num_readers)]
    received: list[list[list[bytes]]] = [[] for _ in readers]

    def writing():
        for message in sent:
            yield from writer.write(message)

    def read(reader: int) -> None:
        if (frames := readers[reader].pop()) is not None:
            received[reader].append(contents(frames))
            assert received[reader] == sent[: len(received[reader])]

    steps = writing()
    for turn in turns:
        if turn < num_readers:
            read(turn)
        else:
            next(steps, None)
    # from now on everybody in turn: nobody waits for ever
    for _ in steps:
        for reader in range(num_readers):
            read(reader)
    for reader in range(num_readers):
        while readers[reader].ready():
            read(reader)
    assert received == [sent] * num_readers


def test_ring_small_message_does_not_wait_for_readers():
    writer = RingWriter(make_memory(1), [0])
    assert all(writer.write([b"m", bytes(LARGE)]))


def test_ring_received_frames_belong_to_reader():
    memory = make_memory(1)
    writer, reader = RingWriter(memory, [0]), RingReader(memory, 0)
    for array in (b"s" * 16, b"l" * LARGE):
        assert all(writer.write([b"m", array]))
        frames = reader.pop()
        memory.data[:] = bytes(CAPACITY)
        assert contents(frames) == [b"m", array]


def test_ring_full_names_slow_readers_and_writes_nothing():
    memory = make_memory(3)
    writer = RingWriter(memory, [0, 2])
    readers = [RingReader(memory, reader) for reader in range(3)]
    count = 0
    while next(writer.write([bytes(40)])):
        count += 1
        readers[0].pop()
    assert writer.slow_readers() == [2]  # and not 1, which is not waited for
    assert not writer.has_room()
    assert readers[2].pop() is not None
    assert writer.has_room()
    assert next(writer.write([b"after"]))
    received = []
    while (frames := readers[2].pop()) is not None:
        received.append(contents(frames))
    assert received == [[bytes(40)]] * (count - 1) + [[b"after"]]


def test_ring_cut_off_message_later_writes_raise():
    writer = RingWriter(make_memory(1), [0])
    steps = writer.write([bytes(3 * CAPACITY)])
    while next(steps):
        pass
    steps.close()
    with pytest.raises(ChannelClosed):
        next(writer.write([b"m"]))


def test_ring_unstarted_message_is_not_cut_off():
    memory = make_memory(1)
    writer, reader = RingWriter(memory, [0]), RingReader(memory, 0)
    while next(writer.write([bytes(48)])):  # with its header a divisor of the capacity: the ring is full
        pass
    assert not next(writer.write([bytes(3 * CAPACITY)]))
    while reader.pop():
        pass
    assert next(writer.write([b"m"]))
    assert contents(reader.pop()) == [b"m"]


@pytest.mark.parametrize("capacity", [0, 256, 1000])
def test_ring_capacity_not_power_of_two_is_refused(capacity):
    with pytest.raises(ValueError, match="power of two"):
        RingWriter(make_memory(1, capacity), [0])


def test_ring_too_many_frames_are_refused():
    with pytest.raises(ValueError, match="frames"):
        next(RingWriter(make_memory(1), [0]).write([b""] * 100))
