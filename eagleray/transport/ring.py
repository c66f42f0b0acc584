"""A ring of records in memory: one writer, many readers; nothing is dropped or overwritten, and nothing waits here.

The memory may be shared between processes. Positions are counts of bytes that only grow: the writer's `head`, and a
`tail` for each reader. Bytes between the slowest tail and head are not written again; a writer without room reports it
and is called again later.

A message that is small against the ring is one record. A larger one is a record with the sizes of its frames, then
records with pieces of them: the reader copies each piece to where it belongs and the writer continues as pieces are
read, so that the size of a message is not limited by the ring's, and nothing outside of it is needed.

Memory order. Words are read and written through `memoryview`s of format "Q", which CPython compiles to one aligned
move. On x86-64 no store is reordered with an earlier store and no load with an earlier load (total store order), so
that a reader that sees a new head also sees the bytes before it, and a writer that sees a new tail may overwrite the
bytes before that. Other processors give no such guarantee, and do not get this ring (`shared_rings.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from eagleray.errors import ChannelClosed

Frame = bytes | bytearray | memoryview
"""Frame to send; a memoryview must be one-dimensional, of bytes."""

WORD = 8
LINE = 8
"""Words in a cache line; words that different processes write are on different lines."""

HEAD = 0
WANTED = LINE
TAILS = 2 * LINE

PIECES = 16
"""Divisor of the capacity that bounds a record: writer and readers work on different pieces at the same time."""

WHOLE, START, PIECE, PAD = range(4)
"""Kinds of records. A record begins with the word `count * 4 + kind`.

`WHOLE`: the sizes of `count` frames, a word each, and their bytes. `START`: the sizes alone. `PIECE`: `count` bytes of
the first frame that is not complete yet. `PAD`: nothing up to the end of the ring, since records do not wrap.
"""


def control_bytes(num_readers: int) -> int:
    """Return the size of the positions in memory."""
    return (TAILS + LINE * num_readers) * WORD


class RingMemory(NamedTuple):
    """Views of a ring, all zeros before its first use."""

    control: memoryview
    """[control_bytes / 8] words: head, wanted, a tail for each reader"""
    words: memoryview
    """[capacity / 8] words: the same memory as `data`"""
    data: memoryview
    """[capacity] bytes; a power of two, at least 512"""
    wanted: memoryview
    """[1] word of `control`, which a sleeping writer sets while it wants room."""


class RingWriter:
    """Writer of a ring. It waits only for the reader numbers in `readers`."""

    def __init__(self, memory: RingMemory, readers: Sequence[int]) -> None:
        self._control, self._words, self._data, _ = memory
        self._tails = {reader: TAILS + LINE * reader for reader in readers}
        self._capacity = len(self._data)
        if self._capacity < 512 or self._capacity & (self._capacity - 1):
            raise ValueError(f"the capacity of a ring is a power of two and at least 512, not {self._capacity}")
        self._max_record = self._capacity // PIECES
        self._head = self._control[HEAD]
        self._end = self._head  # position of the head after the record that is being written or waits for room
        self._limit = self._head  # known end of the room; tails are read only when it is reached
        self._unfinished = False

    def write(self, frames: Sequence[Frame]) -> Iterator[bool]:
        """Write a message as far as there is room. Yields True after each record, False when there is no room.

        A caller that stops iterating after a True and before the end has cut the message off: later writes raise
        `ChannelClosed`, because readers would take what follows for the rest of it.
        """
        if self._unfinished:
            raise ChannelClosed("an earlier message was cut off by its deadline: nothing can follow it")
        sizes = list(map(len, frames))
        begin = WORD * (1 + len(sizes))
        total = begin + sum(sizes)
        if total > self._max_record:
            yield from self._write_pieces(frames, sizes)
            return
        while (start := self._reserve(total)) is None:
            yield False
        self._put_sizes(start, WHOLE, sizes)
        begin += start
        for frame, size in zip(frames, sizes, strict=True):
            self._data[begin : begin + size] = frame
            begin += size
        self._publish()
        yield True

    def has_room(self) -> bool:
        """Whether the record that waited for room has room now."""
        tails = [self._control[word] for word in self._tails.values()]
        self._limit = min(tails, default=self._head) + self._capacity
        return self._end <= self._limit

    def slow_readers(self) -> list[int]:
        """Return the readers for which the waiting record has no room."""
        return [reader for reader, word in self._tails.items() if self._control[word] + self._capacity < self._end]

    def _write_pieces(self, frames: Sequence[Frame], sizes: list[int]) -> Iterator[bool]:
        if WORD * (1 + len(sizes)) > self._max_record:
            raise ValueError(f"{len(sizes)} frames are too many for a ring of {self._capacity} bytes")
        while (start := self._reserve(WORD * (1 + len(sizes)))) is None:
            yield False
        self._put_sizes(start, START, sizes)
        self._unfinished = True
        self._publish()
        yield True
        largest = self._max_record - WORD
        for frame, size in zip(frames, sizes, strict=True):
            view = memoryview(frame)
            for offset in range(0, size, largest):
                count = min(largest, size - offset)
                while (start := self._reserve(WORD + count)) is None:
                    yield False
                self._words[start >> 3] = count << 2 | PIECE
                self._data[start + WORD : start + WORD + count] = view[offset : offset + count]
                self._publish()
                yield True
        self._unfinished = False

    def _reserve(self, count: int) -> int | None:
        """Return the position of a record of `count` bytes, or None if there is no room for it."""
        count = (count + 7) & -8
        start = self._head & (self._capacity - 1)
        skipped = 0 if start + count <= self._capacity else self._capacity - start
        self._end = self._head + skipped + count
        if self._end > self._limit and not self.has_room():
            return None
        if skipped:
            self._words[start >> 3] = PAD
            return 0
        return start

    def _put_sizes(self, start: int, kind: int, sizes: list[int]) -> None:
        word = start >> 3
        self._words[word] = len(sizes) << 2 | kind
        for size in sizes:
            word += 1
            self._words[word] = size

    def _publish(self) -> None:
        self._head = self._control[HEAD] = self._end


class RingReader:
    def __init__(self, memory: RingMemory, reader: int) -> None:
        self._control, self._words, self._data, _ = memory
        self._capacity = len(self._data)
        self._mask = self._capacity - 1
        self._tail = TAILS + LINE * reader
        self._position = self._control[self._tail]
        self._frames: list[Frame] = []  # frames of a message that arrives in pieces
        self._missing: list[memoryview] = []  # parts of them to be filled, the next one last

    def ready(self) -> bool:
        """Whether something was written that `pop` has not seen."""
        return self._position != self._control[HEAD]

    def pop(self) -> list[Frame] | None:
        """Return the next message, in memory of its own, or None if it is not complete."""
        words, data = self._words, self._data
        while self._position != self._control[HEAD]:
            start = self._position & self._mask
            word = start >> 3
            count, kind = words[word] >> 2, words[word] & 3
            if kind == WHOLE:
                begin = start + WORD * (1 + count)
                frames: list[Frame] = []
                for at in range(word + 1, word + 1 + count):
                    end = begin + words[at]
                    frames.append(bytearray(data[begin:end]))
                    begin = end
                self._advance(begin - start)
                return frames
            if kind == PAD:  # never the last: head moves over it together with the record that follows
                self._position += self._capacity - start
            elif kind == START:
                self._begin_pieces(words[word + 1 : word + 1 + count].tolist())
                self._advance(WORD * (1 + count))
            else:
                self._put_piece(data[start + WORD : start + WORD + count])
                self._advance(WORD + count)
                if not self._missing:
                    frames, self._frames = self._frames, []
                    return frames
        return None

    def _begin_pieces(self, sizes: list[int]) -> None:
        # not bytearrays: they would be filled with zeros first
        buffers = [np.empty(size, dtype=np.uint8).data for size in sizes]
        self._frames = list(buffers)
        self._missing = [buffer for buffer in reversed(buffers) if len(buffer)]

    def _put_piece(self, piece: memoryview) -> None:
        target = self._missing.pop()
        target[: len(piece)] = piece
        if len(piece) < len(target):
            self._missing.append(target[len(piece) :])

    def _advance(self, count: int) -> None:
        self._position += (count + 7) & -8
        self._control[self._tail] = self._position
