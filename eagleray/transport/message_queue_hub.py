"""The message queue between an engine and its workers: what the engine sends reaches every worker, each can answer.
Here is the engine's end, in `listener.py` a worker's.

A worker is a *peer*: a number, and a ticket that says how to attach. Peers on the engine's host attach to shared
memory (`shared.py`); where that cannot be had, and from other hosts, they connect (`link.py`). Either medium keeps the
order, drops nothing, and makes a sender wait for a slow receiver. These two files have the waiting: every call has
a deadline and ends when the queue is closed. What is received is memory that belongs to the receiver.
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

CAPACITY = 4 << 20
"""Bytes of a ring in shared memory."""

WINDOW = 16 << 20
"""Bytes under way on a connection, in each direction."""

CHECK_SECONDS = 0.1


class MessageQueueHub:
    """The engine's end. One thread uses it; `wake` and `close` may be called from any."""

    def __init__(
        self, *, bell: Doorbell, hubs: Sequence[SharedRingsHub | LinkHub], tickets: Sequence[MessageQueueHandle]
    ) -> None:
        self._bell = bell
        self._hubs = hubs
        self._tickets = tickets
        self._attached = False
        self._broken = False
        self._inbox: deque[tuple[int, list[Frame]]] = deque()  # what came while a send waited
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
        """A queue for `num_peers` that are still to attach.

        `host` is the address of this host at which peers of other hosts reach it; None if there are none. Raises
        `ConfigError` if it is not an address of this host, or if the memory cannot be had.
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
            tickets = [
                MessageQueueHandle(
                    peer=peer,
                    secret=key,
                    window=window,
                    contact=links.contact,
                    shared=shared.ticket(peer) if shared else None,
                )
                for peer, key in enumerate(keys)
            ]
            stack.pop_all()
        return cls(bell=bell, hubs=[shared, links] if shared else [links], tickets=tickets)

    def ticket(self, peer: int) -> bytes:
        """What `Listener.open` needs. Secret: who has it can be that peer."""
        return msgspec.msgpack.encode(self._tickets[peer])

    def wait_for_peers(self, timeout: float, check: Callable[[], None]) -> dict[int, str]:
        """Wait until every peer has attached, before anything is sent; the medium of each.

        `check` is called again and again and may raise. Raises `DeadlineExceeded`, which names those who are missing.
        """
        deadline = monotonic() + timeout
        with self._in_use:
            while True:
                self._bell.check()
                check()
                media = {peer: medium for hub in self._hubs for peer, medium in hub.attached().items()}
                missing = [ticket.peer for ticket in self._tickets if ticket.peer not in media]
                if not missing:
                    break
                if monotonic() >= deadline:
                    raise DeadlineExceeded(f"{_name(missing)} did not attach to the queue within {timeout:g} s")
                self._bell.wait(_never, min(deadline, monotonic() + CHECK_SECONDS), self._flags)
            self._keep_what_is_used()
            return media

    def send(self, frames: Sequence[Frame], timeout: float, check: Callable[[], None] | None = None) -> None:
        """Hand a message to every peer; returns once it is on its way, waits while a peer's window is full.

        `check`, if given, is called while it waits, and may raise. Raises `DeadlineExceeded`, which names the peers
        that have no room; if by then a part of the message was on its way, the queue is of no more use and later
        sends raise `ChannelClosed`. So does one that waits for a peer that has closed its end.
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
        """(peer, frames) of the next message of any peer; None after `timeout` seconds, or when woken.

        Raises `ChannelClosed` if a connection has lost something, or a peer has broken off a message.
        """
        with self._in_use:
            self._bell.check()
            message = self._take()
            if message is not None or timeout <= 0:
                return message
            deadline = monotonic() + timeout
            while not self._bell.take_wake():
                if broken := [peer for hub in self._hubs for peer in hub.broken_peers()]:
                    raise ChannelClosed(f"{_name(broken)} has broken off a message")
                self._bell.wait(self._ready, deadline, self._flags)
                if (message := self._take()) is not None:
                    return message
                if monotonic() >= deadline:
                    break
            return None

    def wake(self) -> None:
        """A call that waits looks again; `receive`, this one or the next one that waits, returns None."""
        self._bell.wake()

    def close(self) -> None:
        """Calls that wait in other threads end with `ChannelClosed`. What was sent, peers can still receive."""
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

    def _take(self) -> tuple[int, list[Frame]] | None:
        if self._inbox:
            return self._inbox.popleft()
        for hub in self._hubs:
            if (message := hub.take()) is not None:
                return message
        return None

    def _wait_for_room(self, hub: SharedRingsHub | LinkHub, deadline: float, timeout: float) -> None:
        # A peer may not read because it waits for us to read.
        for other in self._hubs:
            while (message := other.take()) is not None:
                self._inbox.append(message)
        slow = hub.slow_peers()
        if gone := set(slow).intersection(hub.gone_peers()):
            raise ChannelClosed(f"{_name(gone)} has closed its end of the queue")
        if slow and monotonic() >= deadline:
            raise DeadlineExceeded(f"{_name(slow)} has no room for a message: too little was read within {timeout:g} s")
        self._bell.wait(lambda: hub.has_room() or self._ready(), deadline, [*self._flags, *hub.room_flags])


def _name(peers: Collection[int]) -> str:
    return f"peer {', '.join(map(str, sorted(peers)))}"


def _never() -> bool:
    return False
