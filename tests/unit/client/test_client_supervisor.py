"""A client that has lost its supervisor ends."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

import pytest
from client_fakes import CLIENT, Setup, asynchronous

from eagleray.client import client
from eagleray.client.preprocess import Prompt
from eagleray.errors import EngineFailed
from eagleray.identity import SUPERVISOR
from eagleray.messages.lifecycle import Attach, ClientStarted, Knows, Unreachable
from eagleray.messages.sampling import SamplingParams


class FakeHeartbeat:
    """Heartbeat whose other side falls silent when the test says so, reported from a thread as by the real one."""

    started: ClassVar[list[FakeHeartbeat]] = []

    def __init__(self, handle, on_silent):
        self.handle = handle
        self.is_closed = False
        self._on_silent = on_silent

    @classmethod
    def start(cls, handle, *, on_silent):
        cls.started.append(cls(handle, on_silent))
        return cls.started[-1]

    def close(self):
        self.is_closed = True

    def fall_silent(self):
        thread = threading.Thread(target=self._on_silent, args=(30.0,))
        thread.start()
        thread.join(5)


@pytest.fixture(autouse=True)
def heartbeats(monkeypatch):
    monkeypatch.setattr(client, "HeartbeatSender", FakeHeartbeat)
    monkeypatch.setattr(client, "CONNECTION_POLL_SECONDS", 0.01)
    FakeHeartbeat.started = []


@asynchronous
async def test_attach_with_heartbeat_handle_starts_heartbeat_first():
    setup = Setup()
    await setup.deliver(Attach(CLIENT, "supervisor", [setup.engine.joined_message()], heartbeat=b"handle"))
    (heartbeat,) = FakeHeartbeat.started
    assert heartbeat.handle == b"handle"
    assert setup.network.mail["supervisor"] == [Knows(CLIENT, setup.engine.id), ClientStarted(CLIENT)]
    await setup.client.close()
    await setup.running
    assert heartbeat.is_closed
    heartbeat.fall_silent()  # after the client was closed
    await asyncio.sleep(0)


@asynchronous
async def test_attach_without_heartbeat_handle_starts_no_heartbeat():
    setup = Setup()
    await setup.deliver(Attach(CLIENT, "supervisor", []))
    assert FakeHeartbeat.started == []
    await setup.client.close()


def test_silent_supervisor_ends_client(caplog):
    async def scenario():
        setup = Setup()
        await setup.deliver(Attach(CLIENT, "supervisor", [setup.engine.joined_message()], heartbeat=b"handle"))
        stream = setup.client.generate(Prompt(token_ids=[5, 6, 7]), SamplingParams())
        FakeHeartbeat.started[0].fall_silent()
        await setup.running
        with pytest.raises(EngineFailed, match="the supervisor was not heard of for 30 s"):
            await stream.result()
        with pytest.raises(EngineFailed, match="not heard of"):
            setup.client.generate(Prompt(token_ids=[5, 6, 7]), SamplingParams())
        await setup.client.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert "this client stops: the supervisor was not heard of for 30 s" in caplog.text


@asynchronous
async def test_broken_connection_to_engine_is_reported_to_supervisor():
    setup = Setup()
    await setup.deliver(Attach(CLIENT, "supervisor", [setup.engine.joined_message()]))
    setup.network.mail["supervisor"].clear()
    setup.outbox.broken = [setup.engine.id]
    while not setup.network.mail["supervisor"]:
        await asyncio.sleep(0.01)
    assert setup.network.mail["supervisor"] == [Unreachable(CLIENT, setup.engine.id)]
    await setup.client.close()


@asynchronous
async def test_broken_connection_to_supervisor_ends_client():
    setup = Setup()
    await setup.deliver(Attach(CLIENT, "supervisor", [setup.engine.joined_message()]))
    stream = setup.client.generate(Prompt(token_ids=[5, 6, 7]), SamplingParams())
    setup.outbox.broken = [SUPERVISOR]
    await setup.running
    with pytest.raises(EngineFailed, match="the connection to the supervisor broke"):
        await stream.result()
    await setup.client.close()
