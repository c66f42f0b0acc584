"""Functions that the actors of the tests run in place of a worker. Found by PYTHONPATH."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import msgspec

from eagleray.errors import ChannelClosed, ConfigError
from eagleray.messages.codec import Codec
from eagleray.messages.steps import Call, Reply
from eagleray.messages.workers import GroupOpened, WorkerSpec
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.transport.message_queue_peer import MessageQueuePeer


class Facts(msgspec.Struct, kw_only=True):
    """Facts about a worker's process."""

    rank: int
    label: str
    pid: int
    medium: str
    nodes: list[str]
    addresses: list[str]
    device_index: int | None
    niceness: int
    environment: dict[str, str]


def echo(payload: bytes) -> None:
    """Answer every call with facts about this process, until the engine closes the queue."""
    _echo(payload)


def echo_by_tcp(payload: bytes) -> None:
    """Answer like `echo`, but over TCP even where the nodes of the test's cluster could share memory."""
    _echo(payload, media=("tcp",))


def _echo(payload: bytes, **options: Any) -> None:
    spec = _spec(payload)
    pulse = HeartbeatSender.start(spec.heartbeat, on_silent=lambda seconds: os._exit(1))
    listener = MessageQueuePeer.open(spec.queue, timeout=30, **options)
    calls: Codec[Call] = Codec(Call)
    replies: Codec[Reply] = Codec(Reply)
    try:
        while True:
            if (frames := listener.receive(30)) is not None:
                call = calls.decode(frames)
                body = GroupOpened(store=msgspec.json.encode(_facts(spec, listener.medium)).decode())
                listener.send(replies.encode(Reply(call.call_id, spec.rank, body)), 30)
    except ChannelClosed:
        return
    finally:
        listener.close()
        pulse.close()


def will_not_end(payload: bytes) -> None:
    """Answer like `echo`, but do not exit when the queue is closed."""
    echo(payload)
    time.sleep(600)


def raises(payload: bytes) -> None:
    if _spec(payload).rank == 1:
        raise KeyError("no such weight")
    time.sleep(600)


def refuses(payload: bytes) -> None:
    raise ConfigError("option `device`: there is none")


def is_killed(payload: bytes) -> None:
    if _spec(payload).rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def ends(payload: bytes) -> None:
    if _spec(payload).rank == 0:
        time.sleep(600)


def hangs(payload: bytes) -> None:
    time.sleep(600)


def _spec(payload: bytes) -> WorkerSpec:
    return msgspec.msgpack.decode(payload, type=WorkerSpec)


def _facts(spec: WorkerSpec, medium: str) -> Facts:
    return Facts(
        rank=spec.rank,
        label=spec.worker.label,
        pid=os.getpid(),
        medium=medium,
        nodes=spec.topology.nodes,
        addresses=spec.topology.addresses,
        device_index=spec.device_index,
        niceness=os.nice(0),
        environment=dict(os.environ),
    )
