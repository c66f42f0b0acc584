"""Starts of servers that may fail: each serves, or exits soon with code 2 and one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fuzzing.arena import Arena
from fuzzing.canary import resident_bytes, server_processes
from fuzzing.values import encode
from fuzzing.wire import get, post

SMALL = ("--port", "0", "--num-threads", "1", "--kv-cache-memory", "16MiB")
START_SECONDS = 60.0
END_SECONDS = 30.0
POLL_SECONDS = 0.05
ORPHAN_SECONDS = 10.0
OUTPUT_SECONDS = 0.3
"""Time after the exit of a process in which the rest of its output is read."""

MOST_BYTES = 3 * 2**30
LONGEST_SENTENCE = 2000
ERROR = "eagleray: error: "
RESTARTED = re.compile(r"engine-0\.\d")
SERVING = re.compile(r"serving .* at http://([^:]+):(\d+)/v1")


async def start_and_judge(
    arena: Arena,
    what: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    enter: Sequence[str] = (),
    most_file_bytes: int | None = None,
) -> None:
    """Start a server and judge the outcome.

    `arguments` of serve; `enter`: a command that executes the rest of its words; `most_file_bytes`: its RLIMIT_FSIZE.
    """
    async with started(arguments, env or {}, enter, most_file_bytes) as (process, log):
        text = await wait_until_serving(arena, process, log, what)
        if (match := SERVING.search(text)) is not None and process.returncode is None:
            await _use(arena, (match[1], int(match[2])), what)
            process.terminate()
            await wait_until_ended(arena, process, what)
            arena.statuses["serves"] += 1
        elif process.returncode is not None:
            _judge_refusal(arena, process.returncode, text, what)


@contextlib.asynccontextmanager
async def started(
    arguments: Sequence[str], env: Mapping[str, str], enter: Sequence[str], most_file_bytes: int | None
) -> AsyncIterator[tuple[asyncio.subprocess.Process, bytearray]]:
    """Start a server and give its process and its output so far; nothing of it is left at the end."""
    words = [*enter, sys.executable, "-m", "eagleray.cli.main", "serve", *arguments, *SMALL]
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,  # not a file, whose size may be limited
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | dict(env),
    )
    if most_file_bytes is not None:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most_file_bytes, most_file_bytes))
    log = bytearray()
    reading = asyncio.create_task(_read(process, log))
    try:
        yield process, log
    finally:
        for pid in reversed(server_processes(process.pid)) if process.returncode is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        with contextlib.suppress(TimeoutError):  # orphans have the pipe until they notice that they are alone
            await asyncio.wait_for(reading, ORPHAN_SECONDS)
        await process.wait()


async def _read(process: asyncio.subprocess.Process, log: bytearray) -> None:
    assert process.stdout is not None
    while data := await process.stdout.read(65536):
        log += data


async def wait_until_serving(arena: Arena, process: asyncio.subprocess.Process, log: bytearray, what: str) -> str:
    """Wait until the server serves or has exited, and return its output."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        ended = process.returncode is not None
        text = log.decode(errors="replace")
        if SERVING.search(text):
            return text
        if ended:
            await asyncio.sleep(OUTPUT_SECONDS)
            return log.decode(errors="replace")
        size = resident_bytes(server_processes(process.pid))
        if size > MOST_BYTES:
            arena.find(f"{what}: the server takes {size / 2**30:.1f} GiB:\n{text[-1000:]}")
            return ""
        if time.monotonic() > deadline:
            arena.find(f"{what}: after {START_SECONDS:g} s the server neither serves nor has ended:\n{text[-1500:]}")
            return ""
        await asyncio.sleep(POLL_SECONDS)


async def _use(arena: Arena, address: tuple[str, int], what: str) -> None:
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Return the"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    for path, body in asked.items():
        began = time.monotonic()
        reply = await post(address, path, encode({**body, "max_tokens": 5, "timeout": 10}), seconds=20)
        arena.judge(reply, f"{what}: {path} after {time.monotonic() - began:.1f} s", has_timeout=True)
        live = await get(address, "/live", seconds=5)
        arena.expect(live.status == 200, f"{what}: /live after {path}: {live.status} {live.trouble}")


async def wait_until_ended(arena: Arena, process: asyncio.subprocess.Process, what: str) -> None:
    try:
        code = await asyncio.wait_for(process.wait(), END_SECONDS)
    except TimeoutError:
        arena.find(f"{what}: told to stop, the server was still there {END_SECONDS:g} s later")
    else:
        arena.expect(code == 0, f"{what}: told to stop, the server ended with exit code {code}")


def _judge_refusal(arena: Arena, code: int, text: str, what: str) -> None:
    arena.statuses[f"exit {code}"] += 1
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    sentences = [line for line in lines if line.startswith(ERROR)]
    wrong = {
        f"exit code {code}, not 2": code != 2,
        "a traceback": "Traceback" in text,
        "the engine was started again": RESTARTED.search(text) is not None,
        "not one sentence at the end": len(sentences) != 1 or sentences != lines[-1:],
        "a line that is too long": max(map(len, lines)) > LONGEST_SENTENCE,
    }
    if any(wrong.values()):
        arena.find(f"{what}: {', '.join(each for each in wrong if wrong[each])}; the last line: {lines[-1][-400:]}")
    for sentence in sentences[-1:]:
        arena.refusals[sentence.removeprefix(ERROR)[:300]] += 1
