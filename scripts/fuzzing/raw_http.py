"""Attacks below HTTP: heads without end, half-sent requests, idle connections, ambiguous lengths, garbage."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator

from fuzzing.arena import Arena, attack
from fuzzing.values import encode
from fuzzing.wire import Reply, exchange, get, request

COMPLETIONS = "/v1/completions"
SMALL = encode({"prompt": "x", "max_tokens": 1})
START = b"POST /v1/completions HTTP/1.1\r\nHost: fuzz\r\nContent-Type: application/json\r\n"
HOLD_SECONDS = 12.0
"""Time for which silent or nearly silent connections are held open."""

NUM_IDLE = 5000
NUM_SLOW = 300
NUM_RANDOM = 8
MOST_HEAD_BYTES = 16 * 2**20
"""Length of a head that must have been refused by then."""

CLOSED = (400, 408, 413, 414, 431, 501, 505)


@attack("http", "a head without end, as fast as the server takes it")
async def headers_without_end(arena: Arena) -> None:
    await _endless(arena, lambda i: b"X-%d: %s\r\n" % (i, b"a" * 100), "headers without end")


@attack("http", "one header without end")
async def one_header_without_end(arena: Arena) -> None:
    await _endless(arena, lambda i: (b"X-Long: " if i == 0 else b"") + b"a" * 8192, "one header without end")


@attack("http", "a request line, a chunk's extension, and trailers without end")
async def other_lines_without_end(arena: Arena) -> None:
    def line(i: int) -> bytes:
        return (b"GET /" if i == 0 else b"") + b"a" * 8192

    await _endless(arena, line, "a request line without end", start=b"")
    chunked = START + b"Transfer-Encoding: chunked\r\n\r\n"
    await _endless(
        arena, lambda i: (b"5;x=" if i == 0 else b"") + b"a" * 8192, "a chunk's extension without end", start=chunked
    )
    trailers = chunked + b"%x\r\n%s\r\n0\r\n" % (len(SMALL), SMALL)
    await _endless(arena, lambda i: b"X-%d: %s\r\n" % (i, b"a" * 100), "trailers without end", start=trailers)


async def _endless(arena: Arena, piece: object, what: str, start: bytes = START) -> None:
    assert callable(piece)
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        yield start
        for number in itertools.count():
            data = b"".join(piece(8 * number + i) for i in range(8))
            sent += len(data)
            yield data

    reply = await exchange(arena.address, pieces(), seconds=15)
    arena.statuses[str(reply.status or "closed")] += 1
    arena.expect("no whole answer" not in reply.trouble, f"{what}: {sent / 2**20:.0f} MB were taken in 15 s")
    arena.expect(reply.status in (0, *CLOSED), f"{what}: answered {reply.status}")
    arena.expect(sent < MOST_HEAD_BYTES, f"{what}: {sent / 2**20:.0f} MB were taken before it was refused")


@attack("http", "heads of many headers and of large ones: each is answered or refused")
async def large_heads(arena: Arena) -> None:
    for what, head in (
        ("a header of a million bytes", b"X-Long: " + b"a" * 1_000_000 + b"\r\n"),
        ("a header name of a million bytes", b"a" * 1_000_000 + b": x\r\n"),
        ("100,000 headers", b"".join(b"X-%d: x\r\n" % i for i in range(100_000))),
        ("100,000 equal headers", b"X: x\r\n" * 100_000),
        ("a folded header of 100,000 lines", b"X: a\r\n" + b" b\r\n" * 100_000),
        ("30,000 bytes of header", b"X-Long: " + b"a" * 30_000 + b"\r\n"),
        ("200 headers", b"".join(b"X-%d: x\r\n" % i for i in range(200))),
    ):
        payload = START + head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(SMALL) + SMALL
        reply = await exchange(arena.address, [payload], seconds=20)
        arena.judge(reply, what, may_be_silent=len(payload) > 60_000)
    long_url = await exchange(arena.address, [request("GET", "/" + "a" * 2_000_000)], seconds=20)
    arena.judge(long_url, "a URL of 2 MB", may_be_silent=True)


@contextlib.asynccontextmanager
async def _held(arena: Arena, count: int, payload: bytes) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Open connections that each send the payload, and close them at the end."""
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(count):
            try:
                async with asyncio.timeout(10):
                    _, writer = await asyncio.open_connection(*arena.address)
            except (OSError, TimeoutError) as error:
                arena.statuses["no connection"] += 1
                if arena.statuses["no connection"] > 20:
                    arena.refusals[f"connections are refused: {error!r}"] += 1
                    break
                continue
            if payload:
                writer.write(payload)
            writers.append(writer)
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()


@attack("http", f"{NUM_IDLE:,} connections that send nothing")
async def idle_connections(arena: Arena) -> None:
    async with _held(arena, NUM_IDLE, b""):
        await asyncio.sleep(HOLD_SECONDS)


@attack("http", f"{NUM_IDLE:,} half-sent heads")
async def half_sent_heads(arena: Arena) -> None:
    async with _held(arena, NUM_IDLE, START + b"X-Half: "):
        await asyncio.sleep(HOLD_SECONDS)


@attack("http", "1,000 half-sent bodies of 32 MB, 30 KB of each")
async def half_sent_bodies(arena: Arena) -> None:
    head = START + b"Content-Length: %d\r\n\r\n" % (32 * 2**20)
    async with _held(arena, 1000, head + b'{"prompt":"' + b"a" * 30_000):
        await asyncio.sleep(HOLD_SECONDS)


@attack("http", "connections that stay after an answer, and say nothing more")
async def idle_after_an_answer(arena: Arena) -> None:
    async with _held(arena, 2000, b"GET /version HTTP/1.1\r\nHost: fuzz\r\n\r\n"):
        await asyncio.sleep(HOLD_SECONDS)


@attack("http", "a silent connection, a half-sent head and a half-sent body are closed in time (takes 100 s)")
async def time_limits(arena: Arena) -> None:
    body = START + b"Content-Length: 1000\r\n\r\n{"
    after = b"GET /version HTTP/1.1\r\nHost: fuzz\r\n\r\n"
    for what, seconds in zip(
        ("a silent connection", "a half-sent head", "a half-sent body", "a connection idle after an answer"),
        await asyncio.gather(*(_lifetime(arena, payload) for payload in (b"", START + b"X: ", body, after))),
        strict=True,
    ):
        arena.expect(seconds < 95, f"{what} is still open after {seconds:.0f} s")
        arena.refusals[f"{what} was closed after {seconds:.0f} s"] += 1


async def _lifetime(arena: Arena, payload: bytes) -> float:
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(*arena.address)
    try:
        writer.write(payload)
        async with asyncio.timeout(100):
            while await reader.read(65536):
                pass
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return time.monotonic() - began


@attack("http", f"{NUM_SLOW} heads, a byte every half second each")
async def slow_heads(arena: Arena) -> None:
    await _trickle(arena, START + b"X: ", b"a")


@attack("http", f"{NUM_SLOW} bodies, a byte every half second each")
async def slow_bodies(arena: Arena) -> None:
    await _trickle(arena, START + b"Content-Length: 1000000\r\n\r\n", b" ")


async def _trickle(arena: Arena, start: bytes, drop: bytes) -> None:
    async with _held(arena, NUM_SLOW, start) as writers:
        deadline = time.monotonic() + HOLD_SECONDS
        while time.monotonic() < deadline:
            for writer in writers:
                if not writer.is_closing():
                    writer.write(drop)
            await asyncio.sleep(0.5)


@attack("http", "a body of 300 KB at 12 KB a second, and one in chunks of a byte: both are taken")
async def steady_bodies(arena: Arena) -> None:
    body = encode({"prompt": "x", "max_tokens": 1}) + b" " * 300_000
    reply = await _paced(arena, request("POST", COMPLETIONS, body), 1200)
    arena.expect(reply.status == 200, f"a slow but steady body: {reply.status} {reply.trouble}{reply.body[:200]!r}")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in SMALL + b" " * 200_000)
    payload = START + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks + b"0\r\n\r\n"
    reply = await exchange(arena.address, [payload])
    arena.expect(reply.status == 200, f"a body in chunks of a byte: {reply.status} {reply.trouble}{reply.body[:200]!r}")


async def _paced(arena: Arena, payload: bytes, size: int) -> Reply:
    """Send ten pieces of this size per second."""
    reader, writer = await asyncio.open_connection(*arena.address)
    reply = Reply()
    try:
        for at in range(0, len(payload), size):
            writer.write(payload[at : at + size])
            await writer.drain()
            await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
        reply.status = int(head.split(b" ")[1])
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        reply.trouble = repr(error)
    finally:
        writer.transport.abort()
    return reply


@attack("http", "no Host, two Hosts, an empty one, and one that is no host")
async def hosts(arena: Arena) -> None:
    for what, lines, statuses in (
        ("no Host", b"", (400,)),
        ("two Hosts", b"Host: a\r\nHost: b\r\n", (400,)),
        ("a Host with a space", b"Host: a b\r\n", (200, 400)),
        ("a Host with a NUL", b"Host: a\x00b\r\n", (400,)),
        ("a Host in capitals", b"HOST: a\r\n", (200,)),
    ):
        payload = b"GET /version HTTP/1.1\r\n" + lines + b"Connection: close\r\n\r\n"
        await _expect(arena, payload, what, statuses)
    await _expect(arena, b"GET /version HTTP/1.0\r\n\r\n", "HTTP/1.0 without Host", (200,))


async def _expect(arena: Arena, payload: bytes, what: str, statuses: tuple[int, ...]) -> None:
    reply = await exchange(arena.address, [payload], seconds=20)
    arena.judge(reply, what, may_be_silent=0 in statuses)
    arena.expect(reply.status in statuses, f"{what}: {reply.status}, not {statuses}: {reply.body[:200]!r}")


@attack("http", "lengths that conflict, that are no numbers, and chunks of bad sizes")
async def lengths(arena: Arena) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n"
    size = b"%x\r\n" % len(SMALL)
    for what, lines, body in (
        ("two lengths", b"Content-Length: 5\r\nContent-Length: 6\r\n", SMALL),
        ("a list of lengths", b"Content-Length: 5, 6\r\n", SMALL),
        ("a length and chunks", b"Content-Length: 5\r\n" + chunked, size + SMALL + b"\r\n0\r\n\r\n"),
        ("a negative length", b"Content-Length: -5\r\n", SMALL),
        ("a length with a sign", b"Content-Length: +5\r\n", SMALL),
        ("a length of 400 digits", b"Content-Length: " + b"9" * 400 + b"\r\n", SMALL),
        ("a length in hex", b"Content-Length: 0x10\r\n", SMALL),
        ("an empty length", b"Content-Length: \r\n", SMALL),
        ("a chunk size of 400 digits", chunked, b"f" * 400 + b"\r\n" + SMALL),
        ("a negative chunk size", chunked, b"-5\r\n" + SMALL),
        ("a chunk size that is none", chunked, b"zz\r\n" + SMALL),
        ("an empty chunk size", chunked, b"\r\n" + SMALL),
        ("a chunk without its line feed", chunked, size + SMALL + b"XX0\r\n\r\n"),
        ("unknown encodings", b"Transfer-Encoding: gzip, chunked\r\n", size + SMALL + b"\r\n0\r\n\r\n"),
        ("chunked twice", b"Transfer-Encoding: chunked, chunked\r\n", size + SMALL + b"\r\n0\r\n\r\n"),
        ("chunked, then identity", b"Transfer-Encoding: chunked, identity\r\n", SMALL),
        ("a space before the colon", b"Content-Length : 5\r\n", SMALL),
        ("a bare line feed", b"X: a\nContent-Length: 5\r\n", SMALL),
        ("a bare carriage return", b"X: a\rb\r\n", SMALL),
    ):
        payload = START + lines + b"Connection: close\r\n\r\n" + body
        reply = await exchange(arena.address, [payload], seconds=5)
        if "no whole answer" in reply.trouble:  # it waits for more of the body: legal where the length is
            arena.refusals[f"{what}: waits for more"] += 1
            continue
        arena.judge(reply, what, may_be_silent=True)
        arena.expect(reply.status != 200 or "length" not in what, f"{what}: was answered with 200")
    await _expect(arena, START + b"Content-Length: 99999999999\r\n\r\n", "a length of 99 GB", (413, 400))


@attack("http", "trailers that smuggle headers are ignored; those that say where a message ends may be refused")
async def trailers(arena: Arena) -> None:
    for line, statuses in (
        (b"X-data-parallel-rank: 77", (200,)),
        (b"Content-Length: 5", (200, 400)),
        (b"Transfer-Encoding: chunked", (200, 400)),
        (b"Host: evil", (200,)),
        (b"Connection: keep-alive", (200,)),
        (b"Content-Type: text/plain", (200,)),
    ):
        chunks = b"%x\r\n%s\r\n0\r\n%s\r\n\r\n" % (len(SMALL), SMALL, line)
        payload = START + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks
        await _expect(arena, payload, f"the trailer {line.decode()!r}", statuses)


@attack("http", "20,000 requests in one connection without waiting, read and unread")
async def pipelining(arena: Arena) -> None:
    one = b"GET /version HTTP/1.1\r\nHost: fuzz\r\n\r\n"
    reader, writer = await asyncio.open_connection(*arena.address)
    reading = asyncio.create_task(_discard(reader))
    try:
        async with asyncio.timeout(30):
            for _ in range(200):
                writer.write(one * 100)
                await writer.drain()
    except (OSError, TimeoutError) as error:
        arena.refusals[f"pipelining ended: {error!r}"] += 1
    reading.cancel()
    writer.transport.abort()
    for path in (b"/openapi.json", b"/metrics"):
        unread = one.replace(b"/version", path) * 20_000
        _, writer = await asyncio.open_connection(*arena.address, limit=1)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(8):
                writer.write(unread)
                await writer.drain()
                await asyncio.sleep(5)
        writer.transport.abort()


async def _discard(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(2**18):
            pass


@attack("http", "5,000 connections that are opened and closed, then 2,000 reset in the middle of a request")
async def connection_flood(arena: Arena) -> None:
    for payload, count in ((b"", 5000), (START + b"Content-Length: 50\r\n\r\n{", 2000)):
        for _ in range(count // 50):
            async with _held(arena, 50, payload):
                pass


@attack("http", "upgrades, Expect, unknown methods, absolute URLs, other versions")
async def odd_requests(arena: Arena) -> None:
    for first in (
        b"GET / HTTP/9.9",
        b"GET / HTTP/2.0",
        b"PRI * HTTP/2.0",
        b"GET /",
        b"get /version HTTP/1.1",
        b"BREW /version HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"CONNECT a:1 HTTP/1.1",
        b"TRACE / HTTP/1.1",
        b"GET http://evil/version HTTP/1.1",
        b"GET //version HTTP/1.1",
        b"GET /v1/models/%00%ff%2e%2e HTTP/1.1",
        b"GET /v1/models/" + b"%41" * 10_000 + b" HTTP/1.1",
        b"GET /version?" + b"a&" * 20_000 + b" HTTP/1.1",
        b"GET /\xff\xfe HTTP/1.1",
        b"GET  /version HTTP/1.1",
        b"POST /v1/completions HTTP/1.1\r\nExpect: nonsense\r\nContent-Length: 0",
        b"GET /version HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x",
        b"GET /version HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x",
    ):
        payload = first + b"\r\nHost: fuzz\r\nConnection: close\r\n\r\n"
        reply = await exchange(arena.address, [payload], seconds=10)
        arena.judge(reply, f"{first[:60]!r}", may_be_silent=True)


@attack("http", "more connections than the server has descriptors: /ready stays reachable", open_files=256)
async def connections_run_out(arena: Arena) -> None:
    async with _held(arena, 400, START + b"X: "):
        for number in range(10):
            reply = await get(arena.address, "/ready", seconds=2)
            arena.expect(
                reply.status == 200, f"/ready #{number}: {reply.status} {reply.trouble} in {reply.seconds:.1f} s"
            )
            await asyncio.sleep(0.3)


@attack("http", "random bytes, and well-formed requests with random damage", is_random=True)
async def random_bytes(arena: Arena) -> None:
    deadline = time.monotonic() + arena.seconds
    numbers = iter(range(10**9)) if arena.case is None else iter([arena.case])

    async def work() -> None:
        for number in numbers:
            payload = _damaged(arena.rng(f"http/{number}"))
            what = f"case {number}: {payload[:100]!r}"
            arena.in_flight[what] = time.monotonic()
            reply = await exchange(arena.address, [payload], seconds=0.5)
            arena.in_flight.pop(what)
            if "no whole answer" not in reply.trouble:
                arena.judge(reply, what, may_be_silent=True)
            if time.monotonic() > deadline:
                return

    await asyncio.gather(*(work() for _ in range(NUM_RANDOM)))


def _damaged(rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(1, 5000))
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/version", "/v1/models/x"))
    data = bytearray(request("POST", path, json.dumps({"prompt": "x", "max_tokens": 1}).encode()))
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 30)]
            case 2:
                data[at:at] = rng.choice((b"\r\n", b"\x00", b"\n", b" ", b":", b"\r\n\r\n", b"\xff" * 20))
            case _:
                data[at:at] = data[: rng.randrange(len(data))]
        if not data:
            return b"\x00"
    return bytes(data)
