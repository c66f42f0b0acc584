"""Medium of the message queue on one host: rings in one shared memory, from the engine to all peers, and from each peer
back.

The engine makes everything, the pipes of the doorbells too; a peer opens what it needs through the engine's `/proc`
entry. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence

import msgspec

from eagleray.errors import ChannelClosed
from eagleray.transport.doorbell import Bell, Doorbell, ring
from eagleray.transport.memfd import NONCE_BYTES, Region, open_descriptor
from eagleray.transport.ring import WANTED, Frame, RingMemory, RingReader, RingWriter, control_bytes

MEDIUM = "shared memory"

WORD = 8
LINE_BYTES = 64

ABSENT, OPEN, CLOSED, BROKEN = range(4)
"""States of an end."""


def supports_shared_memory() -> bool:
    """Whether this machine has memfd, /proc, and the memory order that the rings rely on."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class SharedRingsHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Handle with which a peer attaches. Descriptors are those of process `pid`."""

    pid: int
    memory: int
    nonce: bytes
    num_peers: int
    capacity: int
    engine_pipe: int
    peer: int
    peer_pipe: int


class RingLayout:
    """Offsets in the memory: a line for the nonce, a line for each end (whether it sleeps, its state), then the
    rings."""

    def __init__(self, num_peers: int, capacity: int) -> None:
        assert NONCE_BYTES <= LINE_BYTES
        self._num_peers = num_peers
        self._capacity = capacity
        self._forward = LINE_BYTES * (2 + num_peers)
        self._replies = self._forward + control_bytes(num_peers) + capacity
        self._reply_bytes = control_bytes(1) + capacity
        self.size = self._replies + num_peers * self._reply_bytes

    def end(self, region: Region, peer: int | None) -> tuple[memoryview, memoryview]:
        """Return the words (asleep, state) of a peer or of the engine (None)."""
        offset = LINE_BYTES * (1 if peer is None else 2 + peer)
        return region.words(offset, WORD), region.words(offset + WORD, WORD)

    def forward(self, region: Region) -> RingMemory:
        return self._ring(region, self._forward, self._num_peers)

    def reply(self, region: Region, peer: int) -> RingMemory:
        return self._ring(region, self._replies + peer * self._reply_bytes, 1)

    def _ring(self, region: Region, offset: int, num_readers: int) -> RingMemory:
        data = offset + control_bytes(num_readers)
        return RingMemory(
            control=region.words(offset, control_bytes(num_readers)),
            words=region.words(data, self._capacity),
            data=region.bytes(data, self._capacity),
            wanted=region.words(offset + WANTED * WORD, WORD),
        )


class _Reply:
    """State of one peer at the engine."""

    def __init__(self, region: Region, layout: RingLayout, peer: int, pipe: int) -> None:
        self.peer = peer
        self.pipe = pipe
        asleep, self.state = layout.end(region, peer)
        memory = layout.reply(region, peer)
        self.reader = RingReader(memory, 0)
        self.sent = Bell(pipe, asleep)
        self.read = Bell(pipe, memory.wanted)


class SharedRingsHub:
    """The engine's end."""

    def __init__(self, *, num_peers: int, capacity: int, bell: Doorbell) -> None:
        with contextlib.ExitStack() as stack:
            layout = RingLayout(num_peers, capacity)
            self._region = Region.create(layout.size)
            stack.callback(self._region.close)
            self._pipes = []
            for _ in range(num_peers):
                for descriptor in os.pipe():
                    stack.callback(os.close, descriptor)
                    os.set_blocking(descriptor, False)
                    self._pipes.append(descriptor)
            asleep, self._state = layout.end(self._region, None)
            self._forward = layout.forward(self._region)
            self._all = [_Reply(self._region, layout, i, self._pipes[2 * i + 1]) for i in range(num_peers)]
            self._attached: list[_Reply] = []
            self._writer = RingWriter(self._forward, [])
            self._next = 0
            self._num_peers, self._capacity, self._engine_pipe = num_peers, capacity, bell.write_end
            self.flags = (asleep,)
            self.room_flags = (self._forward.wanted,)
            self._state[0] = OPEN
            self._stack = stack.pop_all()

    def handle(self, peer: int) -> SharedRingsHandle:
        return SharedRingsHandle(
            pid=os.getpid(),
            memory=self._region.descriptor,
            nonce=self._region.nonce,
            num_peers=self._num_peers,
            capacity=self._capacity,
            engine_pipe=self._engine_pipe,
            peer=peer,
            peer_pipe=self._pipes[2 * peer],
        )

    def attached(self) -> dict[int, str]:
        """Return the attached peers and the medium of each. Nothing may have been written yet: the others are not
        waited for."""
        self._attached = [reply for reply in self._all if reply.state[0] != ABSENT]
        self._writer = RingWriter(self._forward, [reply.peer for reply in self._attached])
        return {reply.peer: MEDIUM for reply in self._attached}

    def ready(self) -> bool:
        """Whether something has arrived that `pop` has not seen."""
        for reply in self._attached:  # noqa: SIM110 (asked again and again while spinning)
            if reply.reader.ready():
                return True
        return False

    def pop(self) -> tuple[int, list[Frame]] | None:
        """Return the next message and its peer, if one has arrived; the peers take turns."""
        count = len(self._attached)
        for _ in range(count):
            reply = self._attached[self._next]
            self._next = (self._next + 1) % count
            if reply.reader.ready():
                frames = reply.reader.pop()
                reply.read.ring()
                if frames is not None:
                    return reply.peer, frames
        return None

    def write(self, frames: Sequence[Frame]) -> Iterator[bool]:
        """Write to all peers as far as there is room. Yields True after each part, False when there is no room."""
        for wrote in self._writer.write(frames):
            if wrote:
                for reply in self._attached:
                    reply.sent.ring()
            yield wrote

    def has_room(self) -> bool:
        return self._writer.has_room()

    def slow_peers(self) -> list[int]:
        """Return the peers that must read before there is room."""
        return self._writer.slow_readers()

    def closed_peers(self) -> list[int]:
        """Return the peers that have closed their end."""
        return [reply.peer for reply in self._attached if reply.state[0] == CLOSED]

    def broken_peers(self) -> list[int]:
        """Return the peers that have broken off a message."""
        return [reply.peer for reply in self._attached if reply.state[0] == BROKEN]

    def mark_broken(self) -> None:
        """Mark this end as broken, because the rest of a message will not follow."""
        self._end(BROKEN)

    def close(self) -> None:
        """Release everything; the peers can still read what was written. Call once."""
        if self._state[0] == OPEN:
            self._end(CLOSED)
        self._stack.close()

    def _end(self, state: int) -> None:
        self._state[0] = state
        for reply in self._attached:
            ring(reply.pipe)


class SharedRingsPeer:
    """A peer's end. Raises `OSError` if the engine's memory cannot be reached from here.

    Shared memory does not show that the engine was killed; `HeartbeatSender` does.
    """

    medium = MEDIUM

    def __init__(self, ticket: SharedRingsHandle) -> None:
        with contextlib.ExitStack() as stack:
            layout = RingLayout(ticket.num_peers, ticket.capacity)
            region = Region.attach(pid=ticket.pid, descriptor=ticket.memory, size=layout.size, nonce=ticket.nonce)
            stack.callback(region.close)
            # Open for both directions: we poll it, and wake ourselves.
            own_pipe = open_descriptor(ticket.pid, ticket.peer_pipe, os.O_RDWR)
            self.bell = Doorbell(own_pipe, own_pipe)
            stack.callback(self.bell.close)
            self._engine_pipe = open_descriptor(ticket.pid, ticket.engine_pipe, os.O_WRONLY)
            stack.callback(os.close, self._engine_pipe)
            engine_asleep, self._engine_state = layout.end(region, None)
            asleep, self._state = layout.end(region, ticket.peer)
            if self._state[0] != ABSENT:
                raise ChannelClosed(f"peer {ticket.peer} has attached to the queue already: a ticket is for one use")
            forward, reply = layout.forward(region), layout.reply(region, ticket.peer)
            self._reader = RingReader(forward, ticket.peer)
            self._writer = RingWriter(reply, [0])
            self._sent = Bell(self._engine_pipe, engine_asleep)
            self._read = Bell(self._engine_pipe, forward.wanted)
            self.flags = (asleep,)
            self.room_flags = (reply.wanted,)
            self.ready = self._reader.ready
            self.has_room = self._writer.has_room
            self._state[0] = OPEN
            ring(self._engine_pipe)
            self._stack = stack.pop_all()

    def pop(self) -> list[Frame] | None:
        """Return the next message, if one has arrived."""
        frames = self._reader.pop()
        self._read.ring()
        return frames

    def write(self, frames: Sequence[Frame]) -> Iterator[bool]:
        """See `SharedRingsHub.write`."""
        for wrote in self._writer.write(frames):
            if wrote:
                self._sent.ring()
            yield wrote

    def closed_reason(self) -> str | None:
        """Return the reason for which no message can be exchanged, or None while the engine is attached."""
        if self._engine_state[0] == BROKEN:
            return "the engine has broken off a message to its workers"
        return "the engine has closed its end of the queue" if self._engine_state[0] == CLOSED else None

    def mark_broken(self) -> None:
        """Mark this end as broken, because the rest of a message will not follow."""
        self._end(BROKEN)

    def close(self) -> None:
        """Release everything; the engine can still read what was written. Call once."""
        if self._state[0] == OPEN:
            self._end(CLOSED)
        self._stack.close()

    def _end(self, state: int) -> None:
        self._state[0] = state
        ring(self._engine_pipe)
