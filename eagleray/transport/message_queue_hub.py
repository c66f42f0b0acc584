"""The message queue between an engine and its workers: every worker receives what the engine sends, and each can reply.
This is the engine's end; the workers' is in `message_queue_peer.py`.

A worker is a peer, with a number and a handle that says how to attach. Peers on the engine's host attach to shared
memory (`shared_rings.py`); where that is not possible, and from other hosts, they connect (`link.py`). Either medium
keeps the order, drops nothing, and makes a sender wait for a slow receiver. The hub and the peer do the waiting: every
call has a deadline and returns when the queue is closed. Received memory belongs to the receiver.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.transport.doorbell import Doorbell
from eagleray.transport.link import LinkHub
from eagleray.transport.message_queue_handle import MessageQueueHandle
from eagleray.transport.ring import Frame
from eagleray.transport.router_dealer import SECRET_BYTES
from eagleray.transport.shared_rings import SharedRingsHub, supports_shared_memory
from eagleray.transport.timeouts import CHECK_INTERVAL_SECONDS

CAPACITY = 4 << 20
"""Size of a ring in shared memory, in bytes."""

WINDOW = 16 << 20
"""Bytes in flight on a connection, in each direction."""


class MessageQueueHub:
    """The engine's end. One thread uses it; `wake` and `close` may be called from any."""

    def __init__(
        self, *, bell: Doorbell, hubs: Sequence[SharedRingsHub | LinkHub], handles: Sequence[MessageQueueHandle]
    ) -> None:
        self._bell = bell
        self._hubs = hubs
        self._handles = handles
        self._attached = False
        self._broken = False
        self._inbox: deque[tuple[int, list[Frame]]] = deque()  # messages that arrived while a send waited
        self._flags = [flag for hub in hubs for flag in hub.flags]
        self._in_use = threading.Lock()

    @classmethod
    def open(
        cls,
        *,
        num_peers: int,
        runtime_dir: Path,
        host: str | None = None,
        capacity: int = CAPACITY,
        window: int = WINDOW,
    ) -> MessageQueueHub:
        """Open a queue for `num_peers` peers, which attach later.

        `host` is the address of this host at which peers of other hosts reach it; None if there are none. Raises
        `ConfigError` if it is not an address of this host, or if there is too little memory.
        """
        keys = [secrets.token_bytes(SECRET_BYTES) for _ in range(num_peers)]
        with contextlib.ExitStack() as stack:
            bell = Doorbell.make()
            stack.callback(bell.close)
            links = LinkHub(runtime_dir=runtime_dir, host=host, secrets=keys, window=window)
            stack.callback(links.close)
            bell.watch([links.socket])
            shared = (
                SharedRingsHub(num_peers=num_peers, capacity=capacity, bell=bell) if supports_shared_memory() else None
            )
            handles = [
                MessageQueueHandle(
                    peer=peer,
                    secret=key,
                    window=window,
                    contact=links.contact,
                    shared=shared.handle(peer) if shared else None,
                )
                for peer, key in enumerate(keys)
            ]
            stack.pop_all()
        return cls(bell=bell, hubs=[shared, links] if shared else [links], handles=handles)

    def handle(self, peer: int) -> bytes:
        """Return the handle for `MessageQueuePeer.open`. It is secret: whoever has it can be that peer."""
        return msgspec.msgpack.encode(self._handles[peer])

    def wait_for_peers(self, timeout: float, check: Callable[[], None]) -> dict[int, str]:
        """Wait until every peer has attached, before anything is sent, and return the medium of each.

        `check` is called repeatedly and may raise. Raises `DeadlineExceeded`, which names the missing peers.
        """
        deadline = monotonic() + timeout
        with self._in_use:
            while True:
                self._bell.check()
                check()
                media = {peer: medium for hub in self._hubs for peer, medium in hub.attached().items()}
                missing = [handle.peer for handle in self._handles if handle.peer not in media]
                if not missing:
                    break
                if monotonic() >= deadline:
                    raise DeadlineExceeded(f"{_name(missing)} did not attach to the queue within {timeout:g} s")
                self._bell.wait(_never, min(deadline, monotonic() + CHECK_INTERVAL_SECONDS), self._flags)
            self._keep_what_is_used()
            return media

    def send(self, frames: Sequence[Frame], timeout: float, check: Callable[[], None] | None = None) -> None:
        """Send a message to every peer. Returns once it is in flight; waits while a peer's window is full.

        `check`, if given, is called while it waits, and may raise. Raises `DeadlineExceeded`, which names the peers
        without room; if a part of the message is in flight by then, the queue is broken and later sends raise
        `ChannelClosed`. So does a send that waits for a peer that has closed its end.
        """
        assert self._attached, "wait_for_peers comes first"
        with self._in_use:
            self._bell.check()
            if self._broken:
                raise ChannelClosed("an earlier message was cut off by its deadline: nothing can follow it")
            begun = False
            deadline = 0.0
            try:
                for hub in self._hubs:
                    for wrote in hub.write(frames):
                        if wrote:
                            begun = True
                            continue
                        deadline = deadline or monotonic() + timeout
                        if check:
                            check()
                        self._wait_for_room(hub, deadline, timeout)
            except BaseException:
                if begun:
                    self._broken = True
                    for hub in self._hubs:
                        hub.mark_broken()
                raise

    def receive(self, timeout: float) -> tuple[int, list[Frame]] | None:
        """Return (peer, frames) of the next message of any peer, or None after `timeout` seconds or a `wake`.

        Raises `ChannelClosed` if a connection has lost something, or a peer has broken off a message.
        """
        with self._in_use:
            self._bell.check()
            message = self._pop()
            if message is not None or timeout <= 0:
                return message
            deadline = monotonic() + timeout
            while not self._bell.pop_wake():
                if broken := [peer for hub in self._hubs for peer in hub.broken_peers()]:
                    raise ChannelClosed(f"{_name(broken)} has broken off a message")
                self._bell.wait(self._ready, deadline, self._flags)
                if (message := self._pop()) is not None:
                    return message
                if monotonic() >= deadline:
                    break
            return None

    def wake(self) -> None:
        """Have a waiting call check again; the current or next `receive` that waits returns None."""
        self._bell.wake()

    def close(self) -> None:
        """Close this end: waiting calls of other threads raise `ChannelClosed`. Peers can still receive what was
        sent."""
        self._bell.stop()
        with self._in_use:
            for hub in self._hubs:
                hub.close()
            self._hubs = []
            self._bell.close()

    def _keep_what_is_used(self) -> None:
        unused = [hub for hub in self._hubs if not hub.attached()]
        self._hubs = [hub for hub in self._hubs if hub not in unused]
        for hub in unused:
            hub.close()
        self._bell.watch([hub.socket for hub in self._hubs if isinstance(hub, LinkHub)])
        self._flags = [flag for hub in self._hubs for flag in hub.flags]
        self._attached = True

    def _ready(self) -> bool:
        return any(hub.ready() for hub in self._hubs)

    def _pop(self) -> tuple[int, list[Frame]] | None:
        if self._inbox:
            return self._inbox.popleft()
        for hub in self._hubs:
            if (message := hub.pop()) is not None:
                return message
        return None

    def _wait_for_room(self, hub: SharedRingsHub | LinkHub, deadline: float, timeout: float) -> None:
        # A peer may not read because it waits for us to read.
        for other in self._hubs:
            while (message := other.pop()) is not None:
                self._inbox.append(message)
        slow = hub.slow_peers()
        if closed := set(slow).intersection(hub.closed_peers()):
            raise ChannelClosed(f"{_name(closed)} has closed its end of the queue")
        if slow and monotonic() >= deadline:
            raise DeadlineExceeded(f"{_name(slow)} has no room for a message: too little was read within {timeout:g} s")
        self._bell.wait(lambda: hub.has_room() or self._ready(), deadline, [*self._flags, *hub.room_flags])


def _name(peers: Collection[int]) -> str:
    return f"peer {', '.join(map(str, sorted(peers)))}"


def _never() -> bool:
    return False
