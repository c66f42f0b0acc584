"""The message queue between processes: an engine here, its peers elsewhere."""

from __future__ import annotations

import os
import signal
import time

import pytest
from queue_children import large, small, stream

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.transport.message_queue_hub import MessageQueueHub
from eagleray.transport.message_queue_peer import MessageQueuePeer

SECONDS = 30.0
MEDIA = ("shared memory", "ipc", "tcp")


@pytest.fixture
def connect(spawn_queue_child, runtime_dir):
    """Return a function that opens a queue and starts a process that runs `function` for each of `media`."""
    queues = []

    def connect(function: str, *media: str, said=None, **options):
        broadcaster = MessageQueueHub.open(num_peers=len(media), runtime_dir=runtime_dir, host="127.0.0.1", **options)
        queues.append(broadcaster)
        peers = [
            spawn_queue_child(function, handle=broadcaster.handle(peer).hex(), media=[medium], **(said or {}))
            for peer, medium in enumerate(media)
        ]
        assert broadcaster.wait_for_peers(SECONDS, lambda: None) == dict(enumerate(media))
        assert [reports.get(timeout=SECONDS) for _, reports in peers] == list(media)
        return broadcaster, peers

    yield connect
    for broadcaster in queues:
        broadcaster.close()


def receive(broadcaster: MessageQueueHub) -> tuple[int, list[bytes]]:
    message = broadcaster.receive(SECONDS)
    assert message is not None
    return message


@pytest.mark.parametrize("media", [("shared memory",), ("ipc",), ("tcp",), ("shared memory",) * 2, ("tcp",) * 2])
def test_message_queue_all_peers_reply(connect, media):
    broadcaster, peers = connect("echo", *media)
    for frames in ([b"one"], [b"two", b"array" * 2_000], [b"three", b"array" * 2_000_000, b""]):
        broadcaster.send(frames, SECONDS)
        assert sorted(receive(broadcaster) for _ in media) == [(peer, frames) for peer in range(len(media))]
    broadcaster.close()
    for child, reports in peers:
        assert reports.get(timeout=SECONDS) == "the engine has closed its end of the queue"
        assert child.wait(SECONDS)


def test_message_queue_mixed_media_all_reply(connect):
    broadcaster, _ = connect("echo", "shared memory", "ipc", "tcp", "shared memory")
    for number in range(200):
        broadcaster.send(small(number), SECONDS)
        assert sorted(receive(broadcaster) for _ in range(4)) == [(peer, small(number)) for peer in range(4)]


def check_streams(connect, medium: str, *, num_small: int, num_large: int, size: int, seconds: float) -> None:
    expected = {"num_small": num_small, "num_large": num_large, "size": size}
    broadcaster, ((_, reports),) = connect("compare", medium, said=expected)
    for frames in stream(num_small, num_large, size):
        broadcaster.send(frames, SECONDS)
    assert reports.get(timeout=seconds) == "equal"
    for frames in stream(num_small, num_large, size):
        assert receive(broadcaster) == (0, frames)


@pytest.mark.parametrize("medium", MEDIA)
def test_message_queue_many_messages_arrive_in_order(connect, medium):
    check_streams(connect, medium, num_small=10_000, num_large=10, size=8 << 20, seconds=SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("medium", ["shared memory", "tcp"])
def test_message_queue_very_many_messages_arrive_in_order(connect, medium):
    check_streams(connect, medium, num_small=1_000_000, num_large=1_000, size=8 << 20, seconds=300.0)


@pytest.mark.parametrize("medium", MEDIA)
def test_message_queue_stopped_peer_slows_sender_and_loses_nothing(connect, medium):
    broadcaster, ((child, reports),) = connect("count", medium, capacity=1 << 16, window=1 << 16)
    os.kill(child.pid, signal.SIGSTOP)
    sent = 0
    with pytest.raises(DeadlineExceeded, match="peer 0 "):
        while True:
            broadcaster.send([b"%d" % sent, bytes(1000)], 0.2)
            sent += 1
    os.kill(child.pid, signal.SIGCONT)
    for number in range(sent, sent + 1000):
        broadcaster.send([b"%d" % number, bytes(1000)], SECONDS)
    broadcaster.send([b"end"], SECONDS)
    assert reports.get(timeout=SECONDS) == str(sent + 1000)


@pytest.mark.parametrize("medium", ["ipc", "tcp"])
def test_message_queue_killed_connected_peer_fails_next_send(connect, medium):
    broadcaster, ((child, _),) = connect("echo", medium)
    child.kill()
    assert child.wait(SECONDS)
    deadline = time.monotonic() + SECONDS
    with pytest.raises(ChannelClosed, match="the connection to peer 0 has ended"):
        while time.monotonic() < deadline:
            broadcaster.send([b"m"], SECONDS)


def test_message_queue_killed_shared_memory_peer_blocks_send(connect):
    broadcaster, ((child, _), _) = connect("echo", "shared memory", "shared memory", capacity=1 << 16)
    child.kill()
    assert child.wait(SECONDS)
    sent = answers = 0
    with pytest.raises(DeadlineExceeded, match="peer 0 has no room"):
        while True:
            broadcaster.send(large(sent, 1000), 0.2)
            sent += 1
    while (message := broadcaster.receive(0.2)) is not None:
        assert message == (1, large(answers, 1000))
        answers += 1
    assert answers == sent


@pytest.mark.parametrize("medium", ["ipc", "tcp"])
def test_message_queue_killed_hub_is_noticed_by_peer(spawn_queue_child, runtime_dir, medium):
    child, reports = spawn_queue_child("be_engine", runtime_dir=str(runtime_dir))
    listener = MessageQueuePeer.open(bytes.fromhex(reports.get(timeout=SECONDS)), media=[medium], timeout=SECONDS)
    assert listener.receive(0) is None
    child.kill()
    with pytest.raises(ChannelClosed, match="the connection to the engine has ended"):
        listener.receive(SECONDS)
    listener.close()
