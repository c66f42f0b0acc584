"""A client that no longer hears its supervisor ends."""

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


class FakePulse:
    """Falls silent when the test says so, from a thread of its own as a real one."""

    started: ClassVar[list[FakePulse]] = []

    def __init__(self, ticket, on_silent):
        self.ticket = ticket
        self.is_closed = False
        self._on_silent = on_silent

    @classmethod
    def start(cls, ticket, *, on_silent):
        cls.started.append(cls(ticket, on_silent))
        return cls.started[-1]

    def close(self):
        self.is_closed = True

    def fall_silent(self):
        thread = threading.Thread(target=self._on_silent, args=(30.0,))
        thread.start()
        thread.join(5)


@pytest.fixture(autouse=True)
def pulses(monkeypatch):
    monkeypatch.setattr(client, "HeartbeatSender", FakePulse)
    monkeypatch.setattr(client, "CONNECTION_POLL_SECONDS", 0.01)
    FakePulse.started = []


@asynchronous
async def test_a_ticket_is_used_before_the_client_says_that_it_has_started():
    setup = Setup()
    await setup.deliver(Attach(CLIENT, "supervisor", [setup.engine.joined()], heartbeat=b"ticket"))
    (pulse,) = FakePulse.started
    assert pulse.ticket == b"ticket"
    assert setup.network.mail["supervisor"] == [Knows(CLIENT, setup.engine.id), ClientStarted(CLIENT)]
    await setup.client.close()
    await setup.running
    assert pulse.is_closed
    pulse.fall_silent()  # too late to matter
    await asyncio.sleep(0)


@asynchronous
async def test_who_has_no_ticket_has_no_pulse():
    setup = Setup()
    await setup.deliver(Attach(CLIENT, "supervisor", []))
    assert FakePulse.started == []
    await setup.client.close()


def test_silence_ends_the_client(caplog):
    async def scenario():
        setup = Setup()
        await setup.deliver(Attach(CLIENT, "supervisor", [setup.engine.joined()], heartbeat=b"ticket"))
        stream = setup.client.generate(Prompt(token_ids=[5, 6, 7]), SamplingParams())
        FakePulse.started[0].fall_silent()
        await setup.running
        with pytest.raises(EngineFailed, match="the supervisor was not heard of for 30 s"):
            await stream.result()
        with pytest.raises(EngineFailed, match="not heard of"):
            setup.client.generate(Prompt(token_ids=[5, 6, 7]), SamplingParams())
        await setup.client.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert "the supervisor was not heard of for 30 s: this client ends" in caplog.text


@asynchronous
async def test_an_engine_that_cannot_be_reached_is_told_to_the_supervisor():
    setup = Setup()
    await setup.deliver(Attach(CLIENT, "supervisor", [setup.engine.joined()]))
    setup.network.mail["supervisor"].clear()
    setup.outbox.broken = [setup.engine.id]
    while not setup.network.mail["supervisor"]:
        await asyncio.sleep(0.01)
    assert setup.network.mail["supervisor"] == [Unreachable(CLIENT, setup.engine.id)]
    await setup.client.close()


@asynchronous
async def test_a_client_that_cannot_reach_its_supervisor_ends():
    setup = Setup()
    await setup.deliver(Attach(CLIENT, "supervisor", [setup.engine.joined()]))
    stream = setup.client.generate(Prompt(token_ids=[5, 6, 7]), SamplingParams())
    setup.outbox.broken = [SUPERVISOR]
    await setup.running
    with pytest.raises(EngineFailed, match="the connection to the supervisor broke"):
        await stream.result()
    await setup.client.close()
