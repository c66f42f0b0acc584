"""Another client of the server under attack, in a process of its own, and its observations.

It streams one long answer repeatedly and compares its tokens with those of an undisturbed run, requests /live ten times
per second, each time over a new connection, and adds up the memory of the server's processes.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from chaos_server import ChaosFailed

from fuzzing.wire import Address, Broken, exchange, open_stream, request, stream_events

LIVE_EVERY = 0.1
MEMORY_EVERY = 0.1
LATE_EVERY = 0.02
NOTED_GAP = 0.2
"""Shortest pause between two tokens that is recorded."""

SILENCE_SECONDS = 60.0
RETRY_SECONDS = 0.3
PROMPT = "Return the length of the list"
NUM_TOKENS = 1900
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Notes:
    """Observations; times are of `time.monotonic`, which all processes of a machine share."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Arrival of a token after a pause, and the pause in seconds."""
    first_tokens: list[tuple[float, float]] = field(default_factory=list)
    live: list[tuple[float, float, str]] = field(default_factory=list)
    """Time of each request of /live, its duration, and the fault of the answer if it has one."""
    memory: list[tuple[float, int]] = field(default_factory=list)
    pids: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """Process ids of the server after every change."""
    troubles: list[tuple[float, str]] = field(default_factory=list)
    """Streams that broke or had other tokens."""
    turned_away: list[tuple[float, str]] = field(default_factory=list)
    """New streams that were refused with 429 or 503."""
    num_tokens: int = 0
    late: list[tuple[float, float]] = field(default_factory=list)
    """Delays of this process itself, so that a busy machine is not taken for a slow server."""


class Canary:
    """Process of the canary, which runs until `stop`. Raises `ChaosFailed` if it cannot start.

    `pid` is the server's first process, `num_streams` the number of streams that run at a time.
    """

    def __init__(self, address: Address, pid: int, *, num_streams: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, address, pid, num_streams), daemon=True)
        self._process.start()
        theirs.close()
        self._receive(SILENCE_SECONDS)

    def notes(self) -> Notes:
        """Return the observations since the last call."""
        self._ours.send("notes")
        notes: Notes = self._receive(SILENCE_SECONDS)
        return notes

    def stop(self) -> None:
        self._process.kill()
        self._process.join()

    def _receive(self, seconds: float) -> Any:
        if not self._ours.poll(seconds):
            raise ChaosFailed(f"the canary sent nothing for {seconds:g} s")
        found = self._ours.recv()
        if isinstance(found, ChaosFailed):
            raise found
        return found


def server_processes(pid: int) -> list[int]:
    """Return the process and its descendants."""
    found, queue = [], [pid]
    while queue:
        each = queue.pop()
        found.append(each)
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                queue += [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # it has just exited
            continue
    return found


def resident_bytes(pids: list[int]) -> int:
    """Return the resident memory of the processes without the shared part."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:
            continue
        total += (int(fields[1]) - int(fields[2])) * PAGE
    return total


def _run(pipe: Connection, address: Address, pid: int, num_streams: int) -> None:
    try:
        asyncio.run(_Watch(pipe, address, pid).run(num_streams))
    except BaseException as error:
        pipe.send(ChaosFailed(f"the canary failed: {error!r}"))


class _Watch:
    def __init__(self, pipe: Connection, address: Address, pid: int) -> None:
        self._pipe = pipe
        self._address = address
        self._pid = pid
        self._notes = Notes()
        self._expected: list[int] = []
        self._seen_pids: tuple[int, ...] = ()
        self._tasks: dict[asyncio.Task[None], float] = {}
        """Running requests of /live, with their start times."""
        self._last_token: dict[int, float] = {}
        """Arrival of the last token of each running stream."""

    async def run(self, num_streams: int) -> None:
        self._expected = await self._stream()
        if self._notes.troubles or len(self._expected) < NUM_TOKENS:
            raise ChaosFailed(f"undisturbed: {len(self._expected)} tokens, {self._notes.troubles}")
        self._notes = Notes()
        self._pipe.send("ready")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_streams):
                tasks.create_task(self._stream_forever())
            tasks.create_task(self._probe_live())
            tasks.create_task(self._measure())
            tasks.create_task(self._tick())
            tasks.create_task(self._report())

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self._pipe.poll():
                self._pipe.recv()
                notes, self._notes = self._notes, Notes()
                now = time.monotonic()
                notes.gaps += [(now, now - last) for last in self._last_token.values() if now - last > NOTED_GAP]
                notes.live += [(began, now - began, "") for began in self._tasks.values()]
                self._pipe.send(notes)

    async def _stream_forever(self) -> None:
        while True:
            tokens = await self._stream()
            if tokens != self._expected[: len(tokens)]:
                self._notes.troubles.append((time.monotonic(), f"other tokens: {len(tokens)} of them"))

    async def _stream(self) -> list[int]:
        """Return the tokens of one answer, up to the point where it broke off."""
        body = {
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        try:
            payload = request("POST", "/v1/completions", json.dumps(body).encode())
            async with asyncio.timeout(None) as limit, open_stream(self._address, payload) as (reply, reader):
                if reply.status in (429, 503) and "retry-after" in reply.headers:
                    self._notes.turned_away.append((time.monotonic(), str(reply.status)))
                    await asyncio.sleep(RETRY_SECONDS)
                    return tokens
                if reply.status != 200:
                    raise Broken(f"a stream was answered with {reply.status}")
                last = began = time.monotonic()
                async for event in stream_events(reader, reply.headers):
                    limit.reschedule(asyncio.get_running_loop().time() + SILENCE_SECONDS)
                    last = self._record_event(event, tokens, last, began)
            if len(tokens) < NUM_TOKENS:
                raise Broken(f"a stream ended after {len(tokens)} tokens")
        except TimeoutError:
            self._notes.troubles.append((time.monotonic(), f"a stream was silent for {SILENCE_SECONDS:g} s"))
        except (OSError, Broken, asyncio.IncompleteReadError, ValueError) as error:
            self._notes.troubles.append((time.monotonic(), f"{type(error).__name__}: {error}"))
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._last_token.pop(id(tokens), None)
        return tokens

    def _record_event(self, event: bytes, tokens: list[int], last: float, began: float) -> float:
        """Record the arrival of an event and return the time of the last token."""
        if event == b"[DONE]":
            return last
        said = json.loads(event)
        if "error" in said:
            raise Broken(f"an error in a stream: {said['error']}")
        new = [token for choice in said["choices"] for token in choice.get("token_ids") or []]
        if not new:
            return last
        now = time.monotonic()
        if not tokens:
            self._notes.first_tokens.append((now, now - began))
        elif now - last > NOTED_GAP:
            self._notes.gaps.append((now, now - last))
        tokens += new
        self._notes.num_tokens += len(new)
        self._last_token[id(tokens)] = now
        return now

    async def _probe_live(self) -> None:
        while True:
            task = asyncio.create_task(self._probe_once())
            self._tasks[task] = time.monotonic()
            task.add_done_callback(self._tasks.pop)
            await asyncio.sleep(LIVE_EVERY)

    async def _probe_once(self) -> None:
        began = time.monotonic()
        reply = await exchange(self._address, [request("GET", "/live")], seconds=SILENCE_SECONDS)
        trouble = "" if reply.status == 200 else f"{reply.status} {reply.trouble}"
        self._notes.live.append((began, time.monotonic() - began, trouble))

    async def _measure(self) -> None:
        while True:
            pids = server_processes(self._pid)
            now = time.monotonic()
            self._notes.memory.append((now, resident_bytes(pids)))
            if tuple(pids) != self._seen_pids:
                self._seen_pids = tuple(pids)
                self._notes.pids.append((now, self._seen_pids))
            await asyncio.sleep(MEMORY_EVERY)

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(LATE_EVERY)
            if (late := time.monotonic() - began - LATE_EVERY) > 0.1:
                self._notes.late.append((time.monotonic(), late))
