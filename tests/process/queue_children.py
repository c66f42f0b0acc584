"""Targets of the processes of `test_message_queue.py` and `test_heartbeat.py`.

The payload is JSON: the handle in hex, and further arguments.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from eagleray.errors import ChannelClosed
from eagleray.process.parent import Parent
from eagleray.transport.heartbeat import HeartbeatMonitor, HeartbeatSender
from eagleray.transport.message_queue_hub import MessageQueueHub
from eagleray.transport.message_queue_peer import MessageQueuePeer

SECONDS = 60.0


def small(number: int) -> list[bytes]:
    """Return message `number` of a stream: 64 bytes."""
    return [b"%064d" % number]


def large(number: int, size: int) -> list[bytes]:
    """Return message `number` of a stream: its number and an array that depends on it."""
    return [b"%d" % number, bytes([number % 251]) * (size // 2) + bytes([(number + 1) % 251]) * (size - size // 2)]


def stream(num_small: int, num_large: int, size: int):
    for number in range(num_small):
        yield small(number)
    for number in range(num_large):
        yield large(number, size)


def listen(said: dict, parent: Parent) -> MessageQueuePeer:
    options = {"media": said["media"]} if "media" in said else {}
    listener = MessageQueuePeer.open(bytes.fromhex(said["handle"]), timeout=SECONDS, **options)
    parent.report_bound(listener.medium)
    return listener


def echo(payload: bytes, parent: Parent) -> None:
    """Echo every message until the engine closes the queue, then report the reason."""
    listener = listen(json.loads(payload), parent)
    try:
        while True:
            if (frames := listener.receive(SECONDS)) is not None:
                listener.send(frames, SECONDS)
    except ChannelClosed as error:
        parent.report_bound(str(error))
    finally:
        listener.close()


def compare(payload: bytes, parent: Parent) -> None:
    """Receive a stream, report whether it is the expected one, and send it back."""
    said = json.loads(payload)
    listener = listen(said, parent)
    expected = (said["num_small"], said["num_large"], said["size"])
    for frames in stream(*expected):
        if (received := listener.receive(SECONDS)) != frames:
            parent.report_bound(f"{frames[0]!r} was expected, {received and received[0]!r} came")
            return
    parent.report_bound("equal")
    for frames in stream(*expected):
        listener.send(frames, SECONDS)
    listener.receive(SECONDS)  # stay until the engine has everything
    listener.close()


def count(payload: bytes, parent: Parent) -> None:
    """Receive numbers until "end"; report their count if they arrived in order."""
    listener = listen(json.loads(payload), parent)
    number = 0
    while (frames := listener.receive(SECONDS)) is not None and frames[0] != b"end":
        if int(bytes(frames[0])) != number:
            parent.report_bound(f"{number} was expected, {bytes(frames[0])!r} came")
            return
        number += 1
    parent.report_bound(str(number))
    listener.close()


def be_engine(payload: bytes, parent: Parent) -> None:
    """Open a queue, report its handle, and idle once the peer has attached."""
    queue = MessageQueueHub.open(num_peers=1, runtime_dir=Path(json.loads(payload)["runtime_dir"]), host="127.0.0.1")
    parent.report_bound(queue.handle(0).hex())
    queue.wait_for_peers(SECONDS, lambda: None)
    time.sleep(SECONDS)


def monitor(payload: bytes, parent: Parent) -> None:
    """Open a heartbeat monitor; report its handle, the first heartbeat of its peer, and the end of the heartbeats."""
    said = json.loads(payload)
    pulse = HeartbeatMonitor.open(
        num_peers=1,
        runtime_dir=Path(said["runtime_dir"]),
        host=None,
        limit=said["limit"],
        on_silent=lambda peer, seconds: parent.report_bound(f"peer {peer} is silent"),
    )
    parent.report_bound(pulse.handle(0).hex())
    while not pulse._identities:
        time.sleep(0.01)
    parent.report_bound("heard")
    time.sleep(SECONDS)
    pulse.close()


def beat(payload: bytes, parent: Parent) -> None:
    """Send heartbeats; report when the engine does not reply."""
    handle = bytes.fromhex(json.loads(payload)["handle"])
    pulse = HeartbeatSender.start(handle, on_silent=lambda seconds: parent.report_bound("silent"))
    parent.report_bound("started")
    time.sleep(SECONDS)
    pulse.close()
