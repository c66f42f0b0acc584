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


def test_inbox_directory_is_private(runtime_dir):
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700


def test_inbox_messages_arrive_in_order(runtime_dir):
    inbox = Inbox(runtime_dir, "in", decode)
    outbox = Outbox(encode)
    outbox.connect("peer", inbox.address)
    for i in range(5000):  # more than zmq's usual limit of queued messages
        outbox.send("peer", b"%d" % i)
    assert [inbox.receive(5.0) for _ in range(5000)] == [b"%d" % i for i in range(5000)]
    assert inbox.receive(0) is None
    outbox.close()
    inbox.close()


def test_outbox_closed_queued_messages_arrive(runtime_dir):
    inbox = Inbox(runtime_dir, "in", decode)
    outbox = Outbox(encode)
    outbox.connect("peer", inbox.address)
    outbox.send("peer", b"last words")
    outbox.close()
    assert inbox.receive(5.0) == b"last words"
    inbox.close()


def test_outbox_unknown_peer_send_is_ignored(runtime_dir):
    outbox = Outbox(encode)
    outbox.send("nobody", b"x")
    assert "nobody" not in outbox
    outbox.close()


def test_inbox_large_frame_arrives_whole(runtime_dir):
    inbox = Inbox(runtime_dir, "in", decode)
    outbox = Outbox(lambda message: [message[:10], message[10:]])
    outbox.connect("peer", inbox.address)
    message = bytes(range(256)) * 20_000
    outbox.send("peer", message)
    assert inbox.receive(5.0) == message
    outbox.close()
    inbox.close()


def test_async_inbox_wakes_loop_and_raises_when_closed(runtime_dir):
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


def test_inbox_for_other_hosts_leaves_no_file(runtime_dir, far_inbox):
    server, _, key = far_inbox.address.partition("?")
    assert server.startswith(f"tcp://{HOST}:")
    assert len(bytes.fromhex(key)) == 32
    assert not list(runtime_dir.iterdir())


def test_inbox_for_other_hosts_has_its_own_key(runtime_dir, far_inbox):
    other = Inbox(runtime_dir, "in", decode, HOST)
    assert other.address.partition("?")[2] != far_inbox.address.partition("?")[2]
    other.close()


@pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
def test_inbox_tcp_message_arrives_whole(far_inbox, size):
    outbox = Outbox(lambda message: [message[:10], message[10:]])
    outbox.connect("peer", far_inbox.address)
    message = (bytes(range(256)) * (size // 256 + 1))[:size]
    outbox.send("peer", message)
    assert far_inbox.receive(10.0) == message
    outbox.close()


def test_inbox_tcp_messages_arrive_in_order(far_inbox):
    outbox = Outbox(encode)
    outbox.connect("peer", far_inbox.address)
    for i in range(5000):
        outbox.send("peer", b"%d" % i)
    assert [far_inbox.receive(10.0) for _ in range(5000)] == [b"%d" % i for i in range(5000)]
    outbox.close()


def test_inbox_ipv6_address_is_in_brackets(runtime_dir):
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


def test_async_inbox_receives_from_other_hosts(runtime_dir):
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
    """Check that messages sent to `address` do not reach `inbox`, while a later one with its key does."""
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


def test_inbox_wrong_key_delivers_nothing(runtime_dir, far_inbox):
    other = Inbox(runtime_dir, "other", decode, HOST)
    server, _, _ = far_inbox.address.partition("?")
    refused(f"{server}?{other.address.partition('?')[2]}", far_inbox)
    other.close()


def test_inbox_no_key_delivers_nothing(far_inbox):
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


def test_outbox_reused_port_of_exited_peer_gets_nothing(runtime_dir):
    """The new owner of the port has another key, and the outbox does not reconnect, because a replacement has a new
    address."""
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
    """A relay to `server`, "tcp://host:port", that can be cut: both ends get a reset."""

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
    while not (broken := outbox.pop_broken()):
        assert time.monotonic() < deadline, "nothing has broken"
        time.sleep(0.01)
    return broken


def test_outbox_broken_connection_is_reported_once(runtime_dir, far_inbox):
    server, _, key = far_inbox.address.partition("?")
    relay, outbox, near = Relay(server), Outbox(encode), Inbox(runtime_dir, "near", decode)
    outbox.connect("far", f"{relay.address}?{key}")
    outbox.connect("near", near.address)
    for peer, inbox in (("far", far_inbox), ("near", near)):
        outbox.send(peer, b"hello")
        assert inbox.receive(10.0) == b"hello"
    assert outbox.pop_broken() == []
    relay.cut()
    assert wait_for_broken(outbox) == ["far"]
    assert outbox.pop_broken() == []
    outbox.send("far", b"lost")
    outbox.connect("far", far_inbox.address)  # as after it has come back
    outbox.send("far", b"again")
    assert far_inbox.receive(10.0) == b"again"
    assert outbox.pop_broken() == []
    outbox.close()
    near.close()


def test_outbox_unreachable_peer_is_reported(far_inbox):
    outbox = Outbox(encode)
    key = far_inbox.address.partition("?")[2]
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    outbox.connect("nobody", f"tcp://{HOST}:{port}?{key}")
    assert wait_for_broken(outbox) == ["nobody"]
    outbox.disconnect("nobody", linger_ms=0)


def test_outbox_disconnected_peer_is_not_reported(far_inbox):
    outbox = Outbox(encode)
    outbox.connect("peer", far_inbox.address)
    outbox.send("peer", b"hello")
    assert far_inbox.receive(10.0) == b"hello"
    outbox.disconnect("peer")
    far_inbox.close()
    time.sleep(0.2)
    assert outbox.pop_broken() == []


def bind_again(heir: zmq.Socket, address: str) -> None:
    for _ in range(100):  # zmq closes the port in a thread of its own
        with contextlib.suppress(zmq.ZMQError):
            heir.bind(address)
            return
        heir.poll(50)
    raise TimeoutError(address)


def test_inbox_address_of_another_host_is_refused(runtime_dir):
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 .* an address of this host"):
        Inbox(runtime_dir, "in", decode, "192.0.2.1")


@pytest.mark.parametrize(
    "address",
    ["", "tcp://127.0.0.1:5", "tcp://127.0.0.1:5?00", "http://127.0.0.1:5?" + "0" * 64, "tcp://:5?" + "0" * 64],
)
def test_outbox_invalid_address_error_hides_key(address):
    outbox = Outbox(encode)
    with pytest.raises(ConfigError, match="is not the address of an inbox") as caught:
        outbox.connect("peer", address)
    assert "0" * 64 not in str(caught.value)
    assert "peer" not in outbox
    outbox.close()
