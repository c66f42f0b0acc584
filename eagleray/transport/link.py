"""Medium of the message queue between hosts, and for peers of this host that cannot share memory: a zmq connection per
peer.

The engine holds one ROUTER socket for all peers, a peer one DEALER socket. zmq queues without limits of its own:
credits bound the bytes in flight (`credit.py`). A broken connection is not repaired, because the bytes in flight are
lost; the peer notices at once and exits. Nothing here waits, except for the welcome of a new peer.
"""

from __future__ import annotations

import contextlib
import hmac
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import zmq

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.transport.credit import HEADER, Flow, Kind
from eagleray.transport.doorbell import Doorbell
from eagleray.transport.ring import Frame
from eagleray.transport.router_dealer import SocketAddress, bind_router, can_receive, close_router, connect_dealer

COPIED_BYTES = 65536
"""Size below which a received frame is copied: zmq may hold several frames in one piece of memory, unaligned."""

HELLO = HEADER.pack(Kind.HELLO, 0, 0)


def _owned(parts: Sequence[zmq.Frame]) -> tuple[list[Frame], int]:
    """Return the frames and their total size in bytes. Each frame owns its memory."""
    frames: list[Frame] = []
    for part in parts:
        frames.append(bytearray(part.buffer) if len(part) < COPIED_BYTES else part.buffer)
    return frames, sum(map(len, frames))


def _packed(frames: Sequence[Frame]) -> list[zmq.Frame]:
    """Copy the frames once: the sender may change its arrays, and all peers get the same copy."""
    return [zmq.Frame(frame, copy=True) for frame in frames]


class _Link:
    """State of one peer at the engine."""

    def __init__(self, peer: int, medium: str, identity: bytes, window: int) -> None:
        self.peer = peer
        self.medium = medium
        self.identity = identity
        self.flow = Flow(window)


class LinkHub:
    """The engine's end. A peer is admitted if it sends `secrets[peer]`."""

    flags: tuple[memoryview, ...] = ()
    room_flags: tuple[memoryview, ...] = ()

    def __init__(self, *, runtime_dir: Path, host: str | None, secrets: Sequence[bytes], window: int) -> None:
        self.socket, self.contact = bind_router(runtime_dir=runtime_dir, name="queue", host=host)
        self._secrets = secrets
        self._window = window
        self._links: dict[bytes, _Link] = {}
        self._inbox: deque[tuple[_Link, list[Frame], int]] = deque()
        self._wanted = 0

    def attached(self) -> dict[int, str]:
        """Return the attached peers and the medium of each."""
        self._pump()
        return {link.peer: link.medium for link in self._links.values()}

    def ready(self) -> bool:
        """Whether something has arrived that `pop` has not seen."""
        return bool(self._inbox) or can_receive(self.socket)

    def pop(self) -> tuple[int, list[Frame]] | None:
        """Return the next message and its peer, if one has arrived."""
        self._pump()
        if not self._inbox:
            return None
        link, frames, num_bytes = self._inbox.popleft()
        if header := link.flow.consume(num_bytes):
            with contextlib.suppress(ChannelClosed):  # messages before the end are delivered
                self._send(link, header, ())
        return link.peer, frames

    def write(self, frames: Sequence[Frame]) -> Iterator[bool]:
        """Send to all peers at once. Yields False while there is no room, then True."""
        self._wanted = sum(map(len, frames))
        while not self.has_room():
            yield False
        parts = _packed(frames)
        for link in self._links.values():
            self._send(link, link.flow.send(self._wanted), parts)
        yield True

    def has_room(self) -> bool:
        self._pump()
        return not self.slow_peers()

    def slow_peers(self) -> list[int]:
        """Return the peers whose window cannot take the waiting message."""
        return [link.peer for link in self._links.values() if not link.flow.fits(self._wanted)]

    def closed_peers(self) -> list[int]:
        """Return the peers that have closed their end."""
        return [link.peer for link in self._links.values() if link.flow.ended]

    def broken_peers(self) -> list[int]:
        """Return no peer: a message arrives whole or not at all."""
        return []

    def mark_broken(self) -> None:
        """Do nothing: a message arrives whole or not at all."""

    def close(self) -> None:
        """Send BYE to the peers; earlier messages are still sent, for at most a second."""
        for link in self._links.values():
            with contextlib.suppress(ChannelClosed):  # the peer has disconnected first
                self._send(link, link.flow.control(Kind.BYE), ())
        close_router(self.socket, self.contact)

    def _send(self, link: _Link, header: bytes, parts: Sequence[zmq.Frame]) -> None:
        if link.flow.ended:  # like a peer that was just killed: a send fails when its window is full
            return
        try:
            self.socket.send_multipart([link.identity, header, *parts], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise ChannelClosed(f"the connection to peer {link.peer} has ended: {error}") from error

    def _pump(self) -> None:
        """Process everything that has arrived."""
        while can_receive(self.socket):
            identity, *parts = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            link = self._links.get(identity.bytes)
            if link is None:
                self._admit(identity.bytes, [part.bytes for part in parts])
                continue
            try:
                kind = link.flow.on_arrival(parts[0].bytes)
            except ChannelClosed as error:
                raise ChannelClosed(f"the connection to peer {link.peer} has lost something: {error}") from None
            if kind == Kind.DATA:
                self._inbox.append((link, *_owned(parts[1:])))

    def _admit(self, identity: bytes, parts: list[bytes]) -> None:
        """Admit a peer that sends the secret of a free number. Others get no reply."""
        if len(parts) != 3 or parts[0] != HELLO:
            return
        known = [peer for peer, secret in enumerate(self._secrets) if hmac.compare_digest(secret, parts[1])]
        if not known or any(link.peer == known[0] for link in self._links.values()):
            return
        link = _Link(known[0], parts[2].decode(), identity, self._window)
        self._send(link, link.flow.control(Kind.WELCOME), ())
        self._links[identity] = link


class LinkPeer:
    """A peer's end.

    Raises `ChannelClosed` if the engine cannot be reached, `DeadlineExceeded` if it does not reply within `timeout`
    seconds.
    """

    flags: tuple[memoryview, ...] = ()
    room_flags: tuple[memoryview, ...] = ()

    def __init__(
        self,
        contact: SocketAddress,
        *,
        secret: bytes,
        window: int,
        runtime_dir: Path | None,
        media: Collection[str],
        timeout: float,
    ) -> None:
        with contextlib.ExitStack() as stack:
            self._socket, self.medium = connect_dealer(contact, runtime_dir=runtime_dir, media=media)
            stack.callback(self._socket.close)
            # A PAIR socket that receives an event when the connection ends.
            self._news = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stack.callback(self._news.close, linger=0)
            stack.callback(self._socket.disable_monitor)
            self._flow = Flow(window)
            self._inbox: deque[tuple[list[Frame], int]] = deque()
            self._wanted = 0
            self._disconnected = False
            self._introduce(secret, timeout)
            self.bell = Doorbell.make()
            stack.callback(self.bell.close)
            self.bell.watch((self._socket, self._news))
            self._stack = stack.pop_all()

    def ready(self) -> bool:
        """Whether something has arrived that `pop` has not seen."""
        return bool(self._inbox) or can_receive(self._socket)

    def pop(self) -> list[Frame] | None:
        """Return the next message, if one has arrived."""
        self._pump()
        if not self._inbox:
            return None
        frames, num_bytes = self._inbox.popleft()
        if header := self._flow.consume(num_bytes):
            self._socket.send(header, zmq.DONTWAIT)
        return frames

    def write(self, frames: Sequence[Frame]) -> Iterator[bool]:
        """See `LinkHub.write`."""
        self._wanted = sum(map(len, frames))
        while not self.has_room():
            yield False
        self._socket.send_multipart([self._flow.send(self._wanted), *_packed(frames)], zmq.DONTWAIT)
        yield True

    def has_room(self) -> bool:
        self._pump()
        return self._flow.fits(self._wanted)

    def closed_reason(self) -> str | None:
        """Return the reason for which no message can be exchanged, or None while the engine is connected."""
        if not self._disconnected and can_receive(self._news):
            self._news.recv_multipart(zmq.DONTWAIT)
            self._disconnected = True
        if self._flow.ended:
            return "the engine has closed its end of the queue"
        return "the connection to the engine has ended" if self._disconnected else None

    def mark_broken(self) -> None:
        """Do nothing: a message arrives whole or not at all."""

    def close(self) -> None:
        """Send BYE to the engine; earlier messages are still sent, for at most a second."""
        self._socket.send(self._flow.control(Kind.BYE), zmq.DONTWAIT)
        self._stack.close()

    def _introduce(self, secret: bytes, timeout: float) -> None:
        self._socket.send_multipart([HELLO, secret, self.medium.encode()], zmq.DONTWAIT)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._news, zmq.POLLIN)
        if not poller.poll(math.ceil(max(0.0, timeout) * 1000)):
            raise DeadlineExceeded(f"the engine has not answered over {self.medium} within {timeout:.0f} s")
        if not can_receive(self._socket):
            raise ChannelClosed(f"the engine has refused our connection over {self.medium}, or has ended")
        welcome = self._flow.on_arrival(self._socket.recv())
        assert welcome == Kind.WELCOME

    def _pump(self) -> None:
        while can_receive(self._socket):
            header, *parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            if self._flow.on_arrival(header.bytes) == Kind.DATA:
                self._inbox.append(_owned(parts))
