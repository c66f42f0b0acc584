"""Both ends of the queue in one process."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from eagleray.errors import ChannelClosed, ConfigError, DeadlineExceeded
from eagleray.transport.message_queue_hub import MessageQueueHub
from eagleray.transport.message_queue_peer import MessageQueuePeer
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

SECONDS = 20.0
MEDIA = ("shared memory", "ipc", "tcp")


@pytest.fixture
def runtime_dir():
    path = make_runtime_dir()
    yield path
    remove_runtime_dir(path)


@pytest.fixture
def connect(runtime_dir):
    """Return a function that opens a queue with a peer for each given medium."""
    with contextlib.ExitStack() as stack:

        def connect(*media: str, **options) -> tuple[MessageQueueHub, list[MessageQueuePeer]]:
            queue = MessageQueueHub.open(num_peers=len(media), runtime_dir=runtime_dir, host="127.0.0.1", **options)
            stack.callback(queue.close)
            with aside(queue.wait_for_peers, SECONDS, lambda: None) as attached:
                listeners = [
                    MessageQueuePeer.open(queue.handle(peer), media=[medium], timeout=SECONDS)
                    for peer, medium in enumerate(media)
                ]
            for listener in listeners:
                stack.callback(listener.close)
            assert attached == [dict(enumerate(media))]
            return queue, listeners

        yield connect


@contextlib.contextmanager
def aside(call, *arguments):
    """Run `call` in another thread; its result or error is in the list once the block has ended."""
    outcome = []

    def run():
        try:
            outcome.append(call(*arguments))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield outcome
    thread.join(SECONDS)
    assert not thread.is_alive()


def until(condition) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("media", [("shared memory",), ("ipc",), ("tcp",), MEDIA, ("tcp", "shared memory", "tcp")])
def test_queue_message_reaches_all_peers_and_replies_arrive(connect, media):
    queue, listeners = connect(*media)
    for frames in ([b"small"], [b"", bytes(range(256)) * 32], [b"m", b"", b"x" * 3_000_000, b"y" * 100_001]):
        queue.send(frames, SECONDS)
        for listener in listeners:
            received = listener.receive(SECONDS)
            assert received == frames
            listener.send(received, SECONDS)
        answers = [queue.receive(SECONDS) for _ in media]
        assert sorted(answers) == [(peer, frames) for peer in range(len(media))]
    assert queue.receive(0) is None
    assert listeners[0].receive(0.05) is None


@pytest.mark.parametrize("medium", MEDIA)
def test_queue_received_memory_is_owned_and_outlives_queue(connect, medium):
    queue, (listener,) = connect(medium, capacity=1 << 16)
    arrays = [bytes([i]) * size for i, size in enumerate((100, 5_000, 70_000, 300_000))]
    received = []
    with aside(lambda: [received.append(listener.receive(SECONDS)) for _ in arrays]):
        for array in arrays:
            queue.send([b"m", array], SECONDS)
    with aside(lambda: [listener.receive(SECONDS) for _ in range(200)]):
        for _ in range(200):  # the ring is written again from end to end
            queue.send([bytes(5_000)], SECONDS)
    listener.close()
    queue.close()
    assert received == [[b"m", array] for array in arrays]
    for _, array in received:
        assert not memoryview(array).readonly
        memoryview(array)[0] = 1


@pytest.mark.parametrize("medium", MEDIA)
def test_queue_sent_array_may_be_changed_at_once(connect, medium):
    queue, (listener,) = connect(medium)
    array = bytearray(b"a" * 1_000_000)
    queue.send([b"m", memoryview(array)], SECONDS)
    array[:] = b"b" * len(array)
    assert listener.receive(SECONDS) == [b"m", b"a" * len(array)]


@pytest.mark.parametrize("medium", MEDIA)
def test_queue_both_sides_sending_much_does_not_deadlock(connect, medium):
    queue, (listener,) = connect(medium, capacity=1 << 16, window=1 << 16)
    much = [b"m", bytes(200_000)]

    def work():
        for _ in range(5):
            listener.send(much, SECONDS)
        return [listener.receive(SECONDS) for _ in range(5)]

    with aside(work) as outcome:
        for _ in range(5):
            queue.send(much, SECONDS)
        assert [queue.receive(SECONDS) for _ in range(5)] == [(0, much)] * 5
    assert outcome == [[much] * 5]


@pytest.mark.parametrize("medium", MEDIA)
def test_queue_send_timeout_names_peer_and_loses_nothing(connect, medium):
    queue, (quick, slow) = connect("shared memory", medium, capacity=1 << 16, window=1 << 16)
    sent = 0
    with pytest.raises(DeadlineExceeded, match="peer 1 "):
        while True:
            queue.send([b"%d" % sent, bytes(1000)], 0.1)
            assert quick.receive(SECONDS)[0] == b"%d" % sent
            sent += 1
    if medium == "shared memory":  # the message is on its way to nobody: the next one may follow
        assert [slow.receive(SECONDS)[0] for _ in range(sent)] == [b"%d" % number for number in range(sent)]
        queue.send([b"next"], SECONDS)
        assert slow.receive(SECONDS) == [b"next"]
    else:  # the quick one has it, the slow one has not
        with pytest.raises(ChannelClosed):
            queue.send([b"next"], SECONDS)


def test_queue_cut_off_message_is_the_last(connect):
    queue, (listener,) = connect("shared memory", capacity=1 << 16)
    queue.send([b"before"], SECONDS)
    with pytest.raises(DeadlineExceeded, match="peer 0 "):
        queue.send([bytes(1 << 17)], 0.1)
    with pytest.raises(ChannelClosed, match="cut off"):
        queue.send([b"after"], SECONDS)
    assert listener.receive(SECONDS) == [b"before"]
    with pytest.raises(ChannelClosed, match="broken off"):
        listener.receive(SECONDS)


def test_queue_cut_off_reply_is_noticed(connect):
    queue, (listener,) = connect("shared memory", capacity=1 << 16)
    with pytest.raises(DeadlineExceeded):
        listener.send([bytes(1 << 17)], 0.1)
    with pytest.raises(ChannelClosed, match="peer 0 has broken off"):
        queue.receive(SECONDS)
    with pytest.raises(ChannelClosed, match="cut off"):
        listener.send([b"after"], SECONDS)


@pytest.mark.parametrize("medium", MEDIA)
def test_queue_closed_hub_earlier_messages_arrive(connect, medium):
    queue, (listener,) = connect(medium)
    queue.send([b"last"], SECONDS)
    queue.close()
    assert listener.receive(SECONDS) == [b"last"]
    with pytest.raises(ChannelClosed, match="the engine has closed"):
        listener.receive(SECONDS)


@pytest.mark.parametrize("medium", MEDIA)
def test_queue_closed_peer_earlier_replies_arrive(connect, medium):
    queue, (listener,) = connect(medium)
    listener.send([b"last"], SECONDS)
    listener.close()
    assert queue.receive(SECONDS) == (0, [b"last"])
    assert queue.receive(0.05) is None
    with pytest.raises(ChannelClosed, match="peer 0"):
        for _ in range(10):
            queue.send([bytes(5 << 20)], SECONDS)


@pytest.mark.parametrize("medium", MEDIA)
def test_queue_close_ends_waiting_receive(connect, medium):
    queue, (listener,) = connect(medium, capacity=1 << 16, window=1 << 16)
    for end in (queue, listener):
        with aside(end.receive, SECONDS) as outcome:
            time.sleep(0.01)  # most often it sleeps by now; it must not matter
            end.close()
        assert isinstance(outcome[0], ChannelClosed)
        end.close()
        with pytest.raises(ChannelClosed):
            end.send([b"m"], SECONDS)


@pytest.mark.parametrize("medium", MEDIA)
def test_queue_close_ends_waiting_send(connect, medium):
    queue, (listener,) = connect(medium, capacity=1 << 16, window=1 << 16)
    for end in (listener, queue):

        def send_for_ever(end=end):
            while True:
                end.send([bytes(10_000)], SECONDS)

        with aside(send_for_ever) as outcome:
            time.sleep(0.05)  # most often it waits by now; it must not matter
            end.close()
        assert isinstance(outcome[0], ChannelClosed)


@pytest.mark.parametrize("medium", MEDIA)
def test_queue_wake_ends_receive_and_loses_nothing(connect, medium):
    queue, (listener,) = connect(medium)
    with aside(queue.receive, SECONDS) as outcome:
        queue.wake()
    assert outcome == [None]
    queue.wake()
    listener.send([b"m"], SECONDS)
    assert queue.receive(SECONDS) in (None, (0, [b"m"]))


def test_queue_waiting_send_calls_check(connect):
    queue, _ = connect("shared memory", capacity=1 << 16)

    def check():
        raise LookupError("a worker has died")

    with pytest.raises(LookupError):
        queue.send([bytes(1 << 17)], SECONDS, check)


def test_queue_wait_for_peers_timeout_names_missing(runtime_dir):
    queue = MessageQueueHub.open(num_peers=3, runtime_dir=runtime_dir)
    listener = MessageQueuePeer.open(queue.handle(1), timeout=SECONDS)
    with pytest.raises(DeadlineExceeded, match="peer 0, 2 did not attach"):
        queue.wait_for_peers(0.2, lambda: None)
    listener.close()
    queue.close()


def test_queue_wait_for_peers_check_may_raise(runtime_dir):
    queue = MessageQueueHub.open(num_peers=1, runtime_dir=runtime_dir)

    def check():
        raise LookupError("a worker has died")

    with pytest.raises(LookupError):
        queue.wait_for_peers(SECONDS, check)
    with aside(queue.wait_for_peers, SECONDS, lambda: None) as outcome:
        queue.close()
    assert isinstance(outcome[0], ChannelClosed)


def altered(handle: bytes, **changes) -> bytes:
    fields = msgspec.msgpack.decode(handle)
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            fields[part][field] = value
        else:
            fields[part] = value
    return msgspec.msgpack.encode(fields)


def test_queue_peer_with_other_memory_falls_back_to_connection(runtime_dir):
    """In another container the process of that number is not the engine, or its descriptor is another file."""
    queue = MessageQueueHub.open(num_peers=4, runtime_dir=runtime_dir)
    read_end, write_end = os.pipe()
    with aside(queue.wait_for_peers, SECONDS, lambda: None) as outcome:
        listeners = [
            MessageQueuePeer.open(altered(queue.handle(peer), **changes), timeout=SECONDS)
            for peer, changes in enumerate(
                [
                    {},
                    {"shared__nonce": bytes(16)},
                    {"shared__pid": 2**22 + 1},
                    {"shared__memory": read_end},
                ]
            )
        ]
    assert outcome == [{0: "shared memory", 1: "ipc", 2: "ipc", 3: "ipc"}]
    queue.send([b"m"], SECONDS)
    assert [listener.receive(SECONDS) for listener in listeners] == [[b"m"]] * 4
    for end in (*listeners, queue):
        end.close()
    os.close(read_end)
    os.close(write_end)


def test_queue_handle_used_twice_is_refused(connect, runtime_dir):
    queue, (listener,) = connect("shared memory")
    with pytest.raises(ChannelClosed, match="peer 0 has attached to the queue already"):
        MessageQueuePeer.open(queue.handle(0), timeout=SECONDS)
    queue.send([b"m"], SECONDS)
    assert listener.receive(SECONDS) == [b"m"]


def test_queue_peer_with_other_directory_name_attaches(runtime_dir, tmp_path):
    queue = MessageQueueHub.open(num_peers=1, runtime_dir=runtime_dir)
    other = tmp_path / "r"
    other.symlink_to(runtime_dir)
    handle = altered(queue.handle(0), contact__directory="/nonexistent")
    with aside(queue.wait_for_peers, SECONDS, lambda: None) as outcome:
        listener = MessageQueuePeer.open(handle, runtime_dir=other, media=["ipc"], timeout=SECONDS)
    assert outcome == [{0: "ipc"}]
    listener.close()
    queue.close()


def test_queue_unreachable_engine_error_says_so(runtime_dir):
    queue = MessageQueueHub.open(num_peers=1, runtime_dir=runtime_dir)
    with pytest.raises(ChannelClosed, match="no TCP port"):
        MessageQueuePeer.open(queue.handle(0), media=["tcp"], timeout=SECONDS)
    with pytest.raises(DeadlineExceeded, match="has not answered over ipc"):
        MessageQueuePeer.open(queue.handle(0), media=["ipc"], timeout=0.1)
    queue.close()


def test_queue_address_of_another_host_is_refused(runtime_dir):
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.7"):
        MessageQueueHub.open(num_peers=1, runtime_dir=runtime_dir, host="203.0.113.7")


def test_queue_too_little_memory_error_names_needed_size(runtime_dir):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ConfigError, match=r"needs 8\d{6} bytes of shared memory"):
            MessageQueueHub.open(num_peers=1, runtime_dir=runtime_dir, capacity=4 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(runtime_dir.iterdir())


def test_queue_stranger_gets_nothing_and_disturbs_nothing(runtime_dir):
    queue = MessageQueueHub.open(num_peers=1, runtime_dir=runtime_dir, host="127.0.0.1")
    handle = msgspec.msgpack.decode(queue.handle(0))
    address = handle["contact"]["tcp"]
    host, port = address.removeprefix("tcp://").split(":")
    context = zmq.Context.instance()
    with contextlib.ExitStack() as stack:
        noise = stack.enter_context(socket.create_connection((host, int(port))))
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        strangers = []
        for server_key in (None, zmq.curve_keypair()[0], handle["contact"]["server_key"]):
            stranger = context.socket(zmq.DEALER)
            stack.callback(stranger.close, linger=0)
            if server_key is not None:
                stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
                stranger.curve_serverkey = server_key
            stranger.connect(address)
            for frames in ([b""], [b"x" * 17, b"y" * 32, b"tcp"], [b"x"] * 5):
                stranger.send_multipart(frames)
            strangers.append(stranger)
        with aside(queue.wait_for_peers, SECONDS, lambda: None) as outcome:
            with pytest.raises((ChannelClosed, DeadlineExceeded)):
                wrong = altered(queue.handle(0), contact__server_key=zmq.curve_keypair()[0])
                MessageQueuePeer.open(wrong, media=["tcp"], timeout=0.5)
            with pytest.raises(DeadlineExceeded):
                MessageQueuePeer.open(altered(queue.handle(0), secret=bytes(32)), media=["tcp"], timeout=0.5)
            listener = stack.enter_context(
                contextlib.closing(MessageQueuePeer.open(queue.handle(0), media=["tcp"], timeout=SECONDS))
            )
        assert outcome == [{0: "tcp"}]
        with pytest.raises(DeadlineExceeded):  # that peer is here already
            MessageQueuePeer.open(queue.handle(0), media=["tcp"], timeout=0.2)
        for number in range(100):
            queue.send([b"%d" % number], SECONDS)
            assert listener.receive(SECONDS) == [b"%d" % number]
            listener.send([b"%d" % number], SECONDS)
            assert queue.receive(SECONDS) == (0, [b"%d" % number])
            strangers[-1].send_multipart([b"x" * 17, b"y" * 32, b"tcp"])
        assert not any(stranger.poll(0) for stranger in strangers)
        queue.close()


def test_queue_closed_leaves_nothing_behind(connect, runtime_dir):
    def use() -> None:
        queue, listeners = connect(*MEDIA)
        queue.send([b"m", bytes(1_000_000)], SECONDS)
        for listener in listeners:
            assert listener.receive(SECONDS)
            listener.close()
        queue.close()

    use()  # zmq's own threads and files come with the first use
    descriptors, files = len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm")
    for _ in range(3):
        use()
    assert not list(runtime_dir.iterdir())
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)  # zmq closes in a thread
    assert os.listdir("/dev/shm") == files
    assert "memfd:eagleray" not in Path("/proc/self/maps").read_text()
