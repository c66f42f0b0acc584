from __future__ import annotations

import asyncio
import stat

import pytest

from eagleray.errors import ChannelClosed
from eagleray.transport import AsyncInbox, Inbox, Outbox, make_runtime_dir, remove_runtime_dir


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
