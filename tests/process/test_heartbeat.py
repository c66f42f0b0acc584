"""Heartbeats between processes that are stopped, killed, or running."""

from __future__ import annotations

import contextlib
import os
import queue
import signal

import msgspec
import pytest

from eagleray.errors import ChannelClosed
from eagleray.transport.heartbeat import HeartbeatMonitor, HeartbeatSender

SECONDS = 30.0
LIMIT = 1.0


@pytest.fixture
def open_monitor(runtime_dir):
    """Return a function that opens a monitor of `num_peers` peers and returns it with the queue of its reports."""
    with contextlib.ExitStack() as stack:

        def open_monitor(num_peers: int, host: str | None = None, limit: float = LIMIT):
            silent: queue.Queue = queue.Queue()
            monitor = HeartbeatMonitor.open(
                num_peers=num_peers,
                runtime_dir=runtime_dir,
                host=host,
                limit=limit,
                on_silent=lambda peer, seconds: silent.put((peer, seconds)),
            )
            stack.callback(monitor.close)
            return monitor, silent

        yield open_monitor


def without_directory(handle: bytes) -> bytes:
    """Change the handle as if the Unix socket were on another host."""
    return handle.replace(b"eagleray-", b"elsewhere")


def test_heartbeat_stopped_peers_are_reported_once_alone(spawn_queue_child, open_monitor):
    monitor, silent = open_monitor(5, "127.0.0.1")  # the last peer is never heard
    handles = [monitor.handle(peer) for peer in range(4)]
    handles[2:] = map(without_directory, handles[2:])
    peers = [spawn_queue_child("beat", handle=handle.hex()) for handle in handles]
    for _, reports in peers:
        assert reports.get(timeout=SECONDS) == "started"
    with pytest.raises(queue.Empty):
        silent.get(timeout=2 * LIMIT)
    for peer in (1, 3):
        os.kill(peers[peer][0].pid, signal.SIGSTOP)
    found = [silent.get(timeout=SECONDS) for _ in range(2)]
    assert {peer for peer, _ in found} == {1, 3}
    assert all(seconds > LIMIT for _, seconds in found)
    with pytest.raises(queue.Empty):
        silent.get(timeout=2 * LIMIT)
    monitor.close()
    for peer in (0, 2):
        assert peers[peer][1].get(timeout=SECONDS) == "silent"


def test_heartbeat_killed_monitor_is_noticed_by_peer(spawn_queue_child, runtime_dir):
    engine, reports = spawn_queue_child("monitor", runtime_dir=str(runtime_dir), limit=LIMIT)
    heard: queue.Queue = queue.Queue()
    pulse = HeartbeatSender.start(bytes.fromhex(reports.get(timeout=SECONDS)), on_silent=heard.put)
    with pytest.raises(queue.Empty):
        heard.get(timeout=2 * LIMIT)
    engine.kill()
    assert heard.get(timeout=SECONDS) > LIMIT
    pulse.close()
    pulse.close()


def test_heartbeat_stopped_monitor_reports_no_peer(spawn_queue_child, runtime_dir):
    """Both are stopped, as by a debugger or a suspended machine, and continue: the engine first, its peer later."""
    engine, of_engine = spawn_queue_child("monitor", runtime_dir=str(runtime_dir), limit=LIMIT)
    handle = of_engine.get(timeout=SECONDS)
    peer, of_peer = spawn_queue_child("beat", handle=handle)
    assert of_peer.get(timeout=SECONDS) == "started"
    assert of_engine.get(timeout=SECONDS) == "heard"
    for process in (peer, engine):
        os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(queue.Empty):
        of_engine.get(timeout=2 * LIMIT)  # the time for which they are stopped
    for process in (engine, peer):
        os.kill(process.pid, signal.SIGCONT)
    with pytest.raises(queue.Empty):
        of_engine.get(timeout=2 * LIMIT)
    assert of_peer.empty()
    os.kill(peer.pid, signal.SIGSTOP)
    assert of_engine.get(timeout=SECONDS) == "peer 0 is silent"


def test_heartbeat_wrong_secret_is_ignored(open_monitor):
    monitor, silent = open_monitor(1)
    fields = msgspec.msgpack.decode(monitor.handle(0)) | {"secret": bytes(32)}
    with pytest.raises(ChannelClosed, match="no answer to the first heartbeat within 3 s"):
        HeartbeatSender.start(msgspec.msgpack.encode(fields), on_silent=lambda seconds: None)
    assert silent.empty()


def test_heartbeat_invited_and_forgotten_peers_are_handled(spawn_queue_child, open_monitor):
    monitor, silent = open_monitor(0)
    first, handle = monitor.invite()
    second, other_handle = monitor.invite()
    assert first != second
    peers = [spawn_queue_child("beat", handle=one.hex()) for one in (handle, other_handle)]
    for _, reports in peers:
        assert reports.get(timeout=SECONDS) == "started"
    monitor.forget(first)
    for child, _ in peers:
        os.kill(child.pid, signal.SIGSTOP)
    assert silent.get(timeout=SECONDS)[0] == second
    with pytest.raises(queue.Empty):
        silent.get(timeout=2 * LIMIT)
    third, handle = monitor.invite()
    assert third not in (first, second)
    child, reports = spawn_queue_child("beat", handle=handle.hex())
    assert reports.get(timeout=SECONDS) == "started"
    os.kill(child.pid, signal.SIGSTOP)
    assert silent.get(timeout=SECONDS)[0] == third


def test_heartbeat_forgotten_peer_gets_no_reply(open_monitor):
    monitor, _ = open_monitor(0)
    peer, handle = monitor.invite()
    heard: queue.Queue = queue.Queue()
    pulse = HeartbeatSender.start(handle, on_silent=heard.put)
    monitor.forget(peer)
    assert heard.get(timeout=SECONDS) > LIMIT
    pulse.close()
