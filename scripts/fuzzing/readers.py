"""Attacks by clients that do not read their answers, read them slowly, or disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from fuzzing.arena import Arena, attack
from fuzzing.values import encode
from fuzzing.wire import Broken, open_stream, request, stream_events

COMPLETIONS = "/v1/completions"
HOLD_SECONDS = 15.0
LONG: dict[str, Any] = {"prompt": "Return the", "temperature": 1, "ignore_eos": True}
TIMEOUT = 30.0
"""Timeout of each request, so that a server that misses a disconnect is quiet again soon."""


def _payload(**more: Any) -> bytes:
    return request("POST", COMPLETIONS, encode({**LONG, "timeout": TIMEOUT, **more}))


async def _connect(arena: Arena, payload: bytes, *, room: int = 4096) -> socket.socket:
    """Open a connection with a receive buffer of `room` bytes, from which nothing is read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(20):
            await loop.sock_connect(sock, arena.address)
            await loop.sock_sendall(sock, payload)
    except BaseException:
        sock.close()
        raise
    return sock


async def _hold(arena: Arena, payloads: Iterable[bytes]) -> None:
    """Send each request, read nothing for a while, and disconnect."""
    socks: list[socket.socket] = []
    try:
        for payload in payloads:
            try:
                socks.append(await _connect(arena, payload))
            except (OSError, TimeoutError) as error:
                arena.find(f"no connection for a request: {error!r}")
        await asyncio.sleep(HOLD_SECONDS)
    finally:
        for sock in socks:
            sock.close()


@attack("readers", "a stream of 64 choices with 20 log-probabilities that nobody reads")
async def stopped_reader(arena: Arena) -> None:
    await _hold(arena, [_payload(n=64, logprobs=20, max_tokens=1000, stream=True)])


@attack("readers", "twenty streams of 8 choices with log-probabilities that nobody reads")
async def stopped_readers(arena: Arena) -> None:
    await _hold(arena, [_payload(n=8, logprobs=20, max_tokens=1000, stream=True)] * 20)


@attack("readers", "whole answers of 64 choices with 20 log-probabilities that nobody reads")
async def unread_answers(arena: Arena) -> None:
    await _hold(arena, [_payload(n=64, logprobs=20, max_tokens=200)] * 2)


@attack("readers", "64 log-probability streams that are read a byte at a time")
async def slow_readers(arena: Arena) -> None:
    payload = _payload(n=2, logprobs=5, max_tokens=500, stream=True)
    socks = [await _connect(arena, payload) for _ in range(64)]
    loop = asyncio.get_running_loop()
    deadline = time.monotonic() + HOLD_SECONDS
    try:
        while time.monotonic() < deadline:
            for sock in socks:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(0.05):
                        await loop.sock_recv(sock, 1)
            await asyncio.sleep(0.2)
    finally:
        for sock in socks:
            sock.close()


@attack("readers", "200 streams that are closed after their first event")
async def closed_after_an_event(arena: Arena) -> None:
    async def one() -> None:
        try:
            async with open_stream(arena.address, _payload(n=2, max_tokens=1500, stream=True)) as (reply, reader):
                arena.statuses[str(reply.status)] += 1
                async for _ in stream_events(reader, reply.headers):
                    return
        except (OSError, Broken, asyncio.IncompleteReadError) as error:
            arena.find(f"a stream ended before its first event: {error!r}")

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(20)))


@attack("readers", "1,000 requests whose clients leave at once, by FIN and by RST")
async def closed_at_once(arena: Arena) -> None:
    for number in range(1000):
        sock = await _connect(arena, _payload(n=4, max_tokens=1500, stream=number % 2 == 0))
        if number % 3 == 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


@attack("readers", "100 clients that close their sending half after the request")
async def half_closed(arena: Arena) -> None:
    loop = asyncio.get_running_loop()

    async def one() -> None:
        sock = await _connect(arena, _payload(max_tokens=20), room=65536)
        sock.shutdown(socket.SHUT_WR)
        with sock, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(20):
                data = await loop.sock_recv(sock, 65536)
            status = data[9:12].decode(errors="replace")
            arena.statuses[status or "closed"] += 1
            arena.expect(
                not status.startswith("5") or status in ("503", "504"), f"half-closed: answered {data[:300]!r}"
            )

    await asyncio.gather(*(one() for _ in range(100)))


@attack("readers", "random streams, read for a while at a random pace, and left", is_random=True)
async def random_readers(arena: Arena) -> None:
    deadline = time.monotonic() + arena.seconds
    numbers = iter(range(10**9)) if arena.case is None else iter([arena.case])

    async def work() -> None:
        for number in numbers:
            rng = arena.rng(f"readers/{number}")
            more = {
                "n": rng.choice((1, 2, 8, 32)),
                "max_tokens": rng.choice((3, 50, 400, 1500)),
                "stream": rng.random() < 0.8,
            }
            if rng.random() < 0.5:
                more["logprobs"] = rng.choice((0, 5, 20))
            what = f"case {number}: {more}"
            arena.in_flight[what] = time.monotonic()
            try:
                await _read_a_while(arena, rng, _payload(**more))
            except (OSError, TimeoutError) as error:
                arena.find(f"{what}: no connection: {error!r}")
            arena.in_flight.pop(what)
            if time.monotonic() > deadline:
                return

    await asyncio.gather(*(work() for _ in range(6)))


async def _read_a_while(arena: Arena, rng: random.Random, payload: bytes) -> None:
    sock = await _connect(arena, payload, room=rng.choice((2048, 65536)))
    loop = asyncio.get_running_loop()
    with sock:
        for _ in range(rng.randrange(0, 12)):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(0.3):
                    await loop.sock_recv(sock, rng.choice((1, 100, 100_000)))
            await asyncio.sleep(rng.uniform(0, 0.3))
        if rng.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
