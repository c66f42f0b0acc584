from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import struct
import threading
import time

import pytest
import zmq

from eagleray.errors import ChannelClosed, ConfigError
from eagleray.transport.inbox import AsyncInbox, Inbox, Outbox
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir


@pytest.fixture
def runtime_dir():
    path = make_runtime_dir()
    yield path
    remove_runtime_dir(path)


def encode(message: bytes) -> list[bytes]:
    return [message]


def decode(frames: list[bytes]) -> bytes:
    return b"".join(frames)


def test_only_this_user_may_enter_the_directory(runtime_dir):
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700


def test_messages_arrive_in_order_even_if_sent_before_the_receiver_looks(runtime_dir):
    inbox = Inbox(runtime_dir, "in", decode)
    outbox = Outbox(encode)
    outbox.connect("peer", inbox.address)
    for i in range(5000):  # more than zmq's usual limit of queued messages
        outbox.send("peer", b"%d" % i)
    assert [inbox.receive(5.0) for _ in range(5000)] == [b"%d" % i for i in range(5000)]
    assert inbox.receive(0) is None
    outbox.close()
    inbox.close()


def test_what_was_sent_before_closing_still_arrives(runtime_dir):
    inbox = Inbox(runtime_dir, "in", decode)
    outbox = Outbox(encode)
    outbox.connect("peer", inbox.address)
    outbox.send("peer", b"last words")
    outbox.close()
    assert inbox.receive(5.0) == b"last words"
    inbox.close()


def test_sending_to_somebody_unknown_is_harmless(runtime_dir):
    outbox = Outbox(encode)
    outbox.send("nobody", b"x")
    assert "nobody" not in outbox
    outbox.close()


def test_a_large_frame_arrives_whole(runtime_dir):
    inbox = Inbox(runtime_dir, "in", decode)
    outbox = Outbox(lambda message: [message[:10], message[10:]])
    outbox.connect("peer", inbox.address)
    message = bytes(range(256)) * 20_000
    outbox.send("peer", message)
    assert inbox.receive(5.0) == message
    outbox.close()
    inbox.close()


def test_an_asynchronous_inbox_wakes_its_loop_and_ends_when_closed(runtime_dir):
    async def scenario():
        inbox = AsyncInbox(runtime_dir, "in", decode)
        outbox = Outbox(encode)
        outbox.connect("peer", inbox.address)
        waiting = asyncio.create_task(inbox.receive())
        await asyncio.sleep(0)
        outbox.send("peer", b"hello")
        assert await asyncio.wait_for(waiting, 5) == b"hello"
        waiting = asyncio.create_task(inbox.receive())
        await asyncio.sleep(0)
        inbox.close()
        with pytest.raises((ChannelClosed, asyncio.CancelledError)):
            await asyncio.wait_for(waiting, 5)
        outbox.close()

    asyncio.run(scenario())


# Between hosts

HOST = "127.0.0.1"


@pytest.fixture
def far_inbox(runtime_dir):
    inbox = Inbox(runtime_dir, "in", decode, HOST)
    yield inbox
    inbox.close()


def test_an_inbox_for_other_hosts_leaves_nothing_in_the_directory(runtime_dir, far_inbox):
    server, _, key = far_inbox.address.partition("?")
    assert server.startswith(f"tcp://{HOST}:")
    assert len(bytes.fromhex(key)) == 32
    assert not list(runtime_dir.iterdir())


def test_every_inbox_has_a_key_of_its_own(runtime_dir, far_inbox):
    other = Inbox(runtime_dir, "in", decode, HOST)
    assert other.address.partition("?")[2] != far_inbox.address.partition("?")[2]
    other.close()


@pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
def test_what_is_sent_by_tcp_arrives_whole(far_inbox, size):
    outbox = Outbox(lambda message: [message[:10], message[10:]])
    outbox.connect("peer", far_inbox.address)
    message = (bytes(range(256)) * (size // 256 + 1))[:size]
    outbox.send("peer", message)
    assert far_inbox.receive(10.0) == message
    outbox.close()


def test_order_is_kept_by_tcp(far_inbox):
    outbox = Outbox(encode)
    outbox.connect("peer", far_inbox.address)
    for i in range(5000):
        outbox.send("peer", b"%d" % i)
    assert [far_inbox.receive(10.0) for _ in range(5000)] == [b"%d" % i for i in range(5000)]
    outbox.close()


def test_ipv6_is_written_in_brackets(runtime_dir):
    try:
        inbox = Inbox(runtime_dir, "in", decode, "::1")
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert inbox.address.startswith("tcp://[::1]:")
    outbox = Outbox(encode)
    outbox.connect("peer", inbox.address)
    outbox.send("peer", b"hello")
    assert inbox.receive(10.0) == b"hello"
    outbox.close()
    inbox.close()


def test_an_asynchronous_inbox_hears_other_hosts(runtime_dir):
    async def scenario():
        inbox = AsyncInbox(runtime_dir, "in", decode, HOST)
        outbox = Outbox(encode)
        outbox.connect("peer", inbox.address)
        outbox.send("peer", b"hello")
        assert await asyncio.wait_for(inbox.receive(), 10) == b"hello"
        outbox.close()
        inbox.close()

    asyncio.run(scenario())


def refused(address: str, inbox: Inbox) -> None:
    """What is sent to `address` does not reach `inbox`, though it is there: who knows its key is heard after it."""
    stranger, friend = Outbox(encode), Outbox(encode)
    stranger.connect("peer", address)
    stranger.send("peer", b"let me in")
    friend.connect("peer", inbox.address)
    friend.send("peer", b"first")
    assert inbox.receive(10.0) == b"first"
    friend.send("peer", b"second")
    assert inbox.receive(10.0) == b"second"
    assert inbox.receive(0.2) is None
    stranger.disconnect("peer", linger_ms=0)
    friend.close()


def test_a_wrong_key_gets_nothing_through(runtime_dir, far_inbox):
    other = Inbox(runtime_dir, "other", decode, HOST)
    server, _, _ = far_inbox.address.partition("?")
    refused(f"{server}?{other.address.partition('?')[2]}", far_inbox)
    other.close()


def test_a_stranger_without_a_key_gets_nothing_through(far_inbox):
    stranger = zmq.Context.instance().socket(zmq.PUSH)
    stranger.linger = 0
    stranger.connect(far_inbox.address.partition("?")[0])
    stranger.send(b"let me in")
    outbox = Outbox(encode)
    outbox.connect("peer", far_inbox.address)
    outbox.send("peer", b"hello")
    assert far_inbox.receive(10.0) == b"hello"
    assert far_inbox.receive(0.2) is None
    stranger.close()
    outbox.close()


def test_who_takes_the_port_of_a_dead_peer_hears_nothing(runtime_dir):
    """It has another key. And nobody tries again: who lives on has a new address."""
    inbox = Inbox(runtime_dir, "in", decode, HOST)
    outbox = Outbox(encode)
    outbox.connect("peer", inbox.address)
    outbox.send("peer", b"hello")
    assert inbox.receive(10.0) == b"hello"
    server, _, _ = inbox.address.partition("?")
    inbox.close()
    heir = zmq.Context.instance().socket(zmq.PULL)
    heir.linger = 0
    bind_again(heir, server)
    outbox.send("peer", b"for you alone")
    assert not heir.poll(500)
    heir.close()
    outbox.disconnect("peer", linger_ms=0)


class Relay:
    """A way to `server`, "tcp://host:port", that can be cut: both ends are told so by a reset."""

    def __init__(self, server: str) -> None:
        host, port = server.removeprefix("tcp://").split(":")
        self._listener = socket.create_server((HOST, 0))
        self.address = f"tcp://{HOST}:{self._listener.getsockname()[1]}"
        self._server = host, int(port)
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        for end in self._ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RD)  # wakes who reads it
            end.close()
        self._listener.close()

    def _serve(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._server)
        self._ends = [near, far]
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)


def wait_for_broken(outbox: Outbox) -> list[str]:
    deadline = time.monotonic() + 10
    while not (broken := outbox.take_broken()):
        assert time.monotonic() < deadline, "nothing has broken"
        time.sleep(0.01)
    return broken


def test_a_connection_that_breaks_is_told_once(runtime_dir, far_inbox):
    server, _, key = far_inbox.address.partition("?")
    relay, outbox, near = Relay(server), Outbox(encode), Inbox(runtime_dir, "near", decode)
    outbox.connect("far", f"{relay.address}?{key}")
    outbox.connect("near", near.address)
    for peer, inbox in (("far", far_inbox), ("near", near)):
        outbox.send(peer, b"hello")
        assert inbox.receive(10.0) == b"hello"
    assert outbox.take_broken() == []
    relay.cut()
    assert wait_for_broken(outbox) == ["far"]
    assert outbox.take_broken() == []
    outbox.send("far", b"lost")
    outbox.connect("far", far_inbox.address)  # as after it has come back
    outbox.send("far", b"again")
    assert far_inbox.receive(10.0) == b"again"
    assert outbox.take_broken() == []
    outbox.close()
    near.close()


def test_who_cannot_be_reached_from_the_start_is_told_too(far_inbox):
    outbox = Outbox(encode)
    key = far_inbox.address.partition("?")[2]
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    outbox.connect("nobody", f"tcp://{HOST}:{port}?{key}")
    assert wait_for_broken(outbox) == ["nobody"]
    outbox.disconnect("nobody", linger_ms=0)


def test_who_was_forgotten_has_not_broken(far_inbox):
    outbox = Outbox(encode)
    outbox.connect("peer", far_inbox.address)
    outbox.send("peer", b"hello")
    assert far_inbox.receive(10.0) == b"hello"
    outbox.disconnect("peer")
    far_inbox.close()
    time.sleep(0.2)
    assert outbox.take_broken() == []


def bind_again(heir: zmq.Socket, address: str) -> None:
    for _ in range(100):  # zmq closes the port in a thread of its own
        with contextlib.suppress(zmq.ZMQError):
            heir.bind(address)
            return
        heir.poll(50)
    raise TimeoutError(address)


def test_an_address_that_is_not_of_this_host_is_refused(runtime_dir):
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 .* an address of this host"):
        Inbox(runtime_dir, "in", decode, "192.0.2.1")


@pytest.mark.parametrize(
    "address",
    ["", "tcp://127.0.0.1:5", "tcp://127.0.0.1:5?00", "http://127.0.0.1:5?" + "0" * 64, "tcp://:5?" + "0" * 64],
)
def test_what_is_no_address_is_refused_without_showing_a_key(address):
    outbox = Outbox(encode)
    with pytest.raises(ConfigError, match="is not the address of an inbox") as caught:
        outbox.connect("peer", address)
    assert "0" * 64 not in str(caught.value)
    assert "peer" not in outbox
    outbox.close()
