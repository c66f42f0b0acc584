from __future__ import annotations

import asyncio
import time

from fleet_fakes import SECONDS, in_loop

from eagleray.fleet.external_clients import FIRST_INDEX, Leases


def opened() -> tuple[Leases, asyncio.Queue]:
    lapsed: asyncio.Queue = asyncio.Queue()
    return Leases("i", lambda client, seconds: lapsed.put_nowait(client)), lapsed


@in_loop
async def test_leases_open_two_expire_separately():
    leases, lapsed = opened()
    first, second = leases.open("a", 0.05), leases.open("b", 3600.0)
    assert [first.index, second.index] == [FIRST_INDEX, FIRST_INDEX + 1]
    assert (leases.find("a"), leases.find("c")) == (first, None)
    async with asyncio.timeout(SECONDS):
        assert await lapsed.get() == first
    assert first not in leases
    assert list(leases) == [second]
    assert not leases.empty.is_set()
    leases.close()
    assert leases.empty.is_set()
    assert lapsed.empty()


@in_loop
async def test_leases_renew_extends():
    leases, lapsed = opened()
    client = leases.open("a", 0.2)
    leases.renew(client)
    due = leases._leases[client].due
    await asyncio.sleep(0.01)
    leases.renew(client)
    assert leases._leases[client].due > due
    async with asyncio.timeout(SECONDS):
        await lapsed.get()
    leases.renew(client)  # too late, and harmless
    assert client not in leases


@in_loop
async def test_leases_process_was_stopped_begin_anew(monkeypatch):
    monkeypatch.setattr("eagleray.fleet.timeouts.LATE_TIMER_SECONDS", 0.1)
    leases, lapsed = opened()
    client = leases.open("a", 0.1)
    time.sleep(0.4)  # this process was stopped
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert client in leases
    async with asyncio.timeout(SECONDS):
        await lapsed.get()
