"""Heartbeats between a process and those that belong to it (an engine and its workers, a supervisor and the members of
its fleet), in both directions, from a thread on either side: one a second, or four within the limit if that is shorter.

A process that is stopped, or cut off from the network, does not exit and trips no sentinel; only its heartbeats stop.
Time in which the receiving process itself did not run (because it or the machine was stopped) is not counted: when its
own loop is late, its clocks are reset.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import math
import secrets
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

import msgspec
import zmq

from eagleray.errors import ChannelClosed
from eagleray.transport.doorbell import Doorbell
from eagleray.transport.router_dealer import (
    SECRET_BYTES,
    SocketAddress,
    bind_router,
    can_receive,
    close_router,
    connect_dealer,
)
from eagleray.transport.timeouts import (
    FIRST_HEARTBEAT_SECONDS,
    HEARTBEAT_INTERVAL_SECONDS,
    HEARTBEAT_LATE_SECONDS,
    HEARTBEAT_STOP_SECONDS,
)

BEAT = b""

Who = TypeVar("Who", bound=Hashable)


class LivenessClock(Generic[Who]):
    """Time of each peer's last heartbeat. Pure: callers pass the time."""

    def __init__(self, *, limit: float, tick: float, now: float) -> None:
        self._limit = limit
        self._tick = tick
        self._ran = now
        self._last: dict[Who, float] = {}
        self._first_limits: dict[Who, float] = {}
        """Limits, in seconds, for the first heartbeat of expected peers."""
        self._lost: set[Who] = set()

    def expect(self, who: Who, now: float, *, within: float) -> None:
        """Expect the first heartbeat of `who` within `within` seconds."""
        self._last[who] = now
        self._first_limits[who] = within

    def record(self, who: Who, now: float) -> None:
        if who not in self._lost:
            self._last[who] = now
            self._first_limits.pop(who, None)

    def forget(self, who: Who) -> None:
        """Forget `who`, whose heartbeats stop on purpose. No heartbeat of it may be recorded afterwards."""
        self._last.pop(who, None)
        self._first_limits.pop(who, None)
        self._lost.discard(who)

    def silent(self, now: float) -> list[tuple[Who, float]]:
        """Return the peers without a heartbeat for their limit, once each, and for how many seconds. Called every
        `tick` seconds."""
        if now - self._ran > self._tick + HEARTBEAT_LATE_SECONDS:
            self._last = dict.fromkeys(self._last, now)
        self._ran = now
        silent = [
            (who, now - last)
            for who, last in self._last.items()
            if now - last > self._first_limits.get(who, self._limit)
        ]
        for who, _ in silent:
            self._lost.add(who)
            del self._last[who]
            self._first_limits.pop(who, None)
        return silent


class HeartbeatHandle(msgspec.Struct, frozen=True, kw_only=True):
    contact: SocketAddress
    secret: bytes
    limit: float


class HeartbeatMonitor:
    """The end with several peers. Its thread calls `on_silent(peer, seconds)` once for a peer whose heartbeats began
    and then stopped for `limit` seconds; for one without a first heartbeat only if it was invited with a time limit.
    `invite` and `forget` may be called from any thread."""

    def __init__(
        self,
        *,
        socket: zmq.Socket[bytes],
        contact: SocketAddress,
        limit: float,
        on_silent: Callable[[int, float], None],
    ) -> None:
        self._socket = socket
        self._contact = contact
        self._limit = limit
        self._on_silent = on_silent
        self._lock = threading.Lock()
        self._next = itertools.count()
        self._handles: dict[int, HeartbeatHandle] = {}
        self._clocks: LivenessClock[int] = LivenessClock(limit=limit, tick=_tick(limit), now=monotonic())
        self._identities: dict[int, bytes] = {}  # peer -> zmq's identity of its connection
        self._thread = _Thread(
            tick=_tick(limit),
            socket=socket,
            on_message=self._handle_message,
            on_tick=self._beat,
            on_end=lambda: close_router(socket, contact),
        )

    @classmethod
    def open(
        cls,
        *,
        runtime_dir: Path,
        host: str | None,
        limit: float,
        on_silent: Callable[[int, float], None],
        num_peers: int = 0,
    ) -> HeartbeatMonitor:
        """Open a monitor with peers 0 to `num_peers` - 1 invited.

        `host` is the address at which peers of other hosts reach this one; None if there are none. Raises `ConfigError`
        if `host` is not an address of this host.
        """
        socket, contact = bind_router(runtime_dir=runtime_dir, name="pulse", host=host)
        monitor = cls(socket=socket, contact=contact, limit=limit, on_silent=on_silent)
        for _ in range(num_peers):
            monitor.invite()
        return monitor

    def invite(self, *, within: float | None = None) -> tuple[int, bytes]:
        """Invite a peer and return (its number, which is never used again, its handle). `within`: seconds for its first
        heartbeat, or None for no limit."""
        with self._lock:
            peer = next(self._next)
            if within is not None:
                self._clocks.expect(peer, monotonic(), within=max(within, self._limit))
            secret = secrets.token_bytes(SECRET_BYTES)
            self._handles[peer] = HeartbeatHandle(contact=self._contact, secret=secret, limit=self._limit)
            return peer, msgspec.msgpack.encode(self._handles[peer])

    def forget(self, peer: int) -> None:
        """Forget a peer, whose handle becomes void. `on_silent` may still be called for it at this moment."""
        with self._lock:
            self._handles.pop(peer, None)
            self._identities.pop(peer, None)
            self._clocks.forget(peer)

    def handle(self, peer: int) -> bytes:
        """Return the handle for `HeartbeatSender.start`. It is secret: whoever has it can be that peer."""
        return msgspec.msgpack.encode(self._handles[peer])

    def close(self) -> None:
        """Stop the thread; `on_silent` is not called afterwards."""
        self._thread.close()

    def _handle_message(self, parts: list[bytes]) -> None:
        identity, secret = parts[0], parts[-1]
        with self._lock:
            for peer, handle in self._handles.items():
                if hmac.compare_digest(handle.secret, secret):
                    self._clocks.record(peer, monotonic())
                    if peer not in self._identities:
                        self._answer(identity)  # `HeartbeatSender.start` waits for this reply
                    self._identities[peer] = identity

    def _beat(self) -> None:
        with self._lock:
            for identity in self._identities.values():
                self._answer(identity)
            silent = self._clocks.silent(monotonic())
        for peer, seconds in silent:
            self._on_silent(peer, seconds)

    def _answer(self, identity: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer is disconnected: its heartbeats will be missed
            self._socket.send_multipart([identity, BEAT], zmq.DONTWAIT)


class HeartbeatSender:
    """The end with one peer, the monitor. Its thread calls `on_silent(seconds)` once if the monitor does not reply for
    the limit."""

    def __init__(
        self, *, socket: zmq.Socket[bytes], secret: bytes, limit: float, on_silent: Callable[[float], None]
    ) -> None:
        self._socket = socket
        self._secret = secret
        self._on_silent = on_silent
        now = monotonic()
        self._clocks: LivenessClock[None] = LivenessClock(limit=limit, tick=_tick(limit), now=now)
        self._clocks.record(None, now)
        self._is_answered = threading.Event()
        self._thread = _Thread(
            tick=_tick(limit),
            socket=socket,
            on_message=self._handle_message,
            on_tick=self._beat,
            on_end=socket.close,
        )

    @classmethod
    def start(cls, encoded: bytes, *, on_silent: Callable[[float], None]) -> HeartbeatSender:
        """Send heartbeats from now on; when this returns, the monitor will notice if they stop.

        Raises `ChannelClosed` if the monitor cannot be reached or does not reply within the larger of the limit and 3
        s."""
        handle = msgspec.msgpack.decode(encoded, type=HeartbeatHandle)
        socket, _ = connect_dealer(handle.contact)
        sender = cls(socket=socket, secret=handle.secret, limit=handle.limit, on_silent=on_silent)
        timeout = max(handle.limit, FIRST_HEARTBEAT_SECONDS)
        if not sender._is_answered.wait(timeout):
            sender.close()
            raise ChannelClosed(f"no answer to the first heartbeat within {timeout:g} s")
        return sender

    def close(self) -> None:
        """Stop the heartbeats; `on_silent` is not called afterwards."""
        self._thread.close()

    def _handle_message(self, parts: list[bytes]) -> None:
        self._clocks.record(None, monotonic())
        self._is_answered.set()

    def _beat(self) -> None:
        self._socket.send(self._secret, zmq.DONTWAIT)
        for _, seconds in self._clocks.silent(monotonic()):
            self._on_silent(seconds)


class _Thread:
    """Thread that calls `on_message` for each message, `on_tick` every `tick` seconds, `on_end` at the end.

    No other thread touches the socket.
    """

    def __init__(
        self,
        *,
        tick: float,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
        on_tick: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._socket = socket
        self._tick = tick
        self._on_message = on_message
        self._on_tick = on_tick
        self._on_end = on_end
        self._bell = Doorbell.make()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. May be called from any thread, including this one. Idempotent."""
        self._bell.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(HEARTBEAT_STOP_SECONDS)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.read_end, zmq.POLLIN)
        due = monotonic()
        while not self._bell.stopped:
            poller.poll(math.ceil(max(0.0, due - monotonic()) * 1000))
            while can_receive(self._socket):
                self._on_message(self._socket.recv_multipart(zmq.DONTWAIT))
            if monotonic() >= due and not self._bell.stopped:
                self._on_tick()
                due = monotonic() + self._tick
        self._on_end()
        self._bell.close()


def _tick(limit: float) -> float:
    return min(HEARTBEAT_INTERVAL_SECONDS, limit / 4)
