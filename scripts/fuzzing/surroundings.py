"""Attacks through the environment in which a server starts, and by signals."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

from fuzzing.arena import Arena, attack
from fuzzing.starts import SERVING, start_and_judge, started, wait_until_ended, wait_until_serving
from fuzzing.values import encode
from fuzzing.wire import open_stream, request, stream_events

TINY = 'mount -t tmpfs -o size=16k none "$0" && exec "$@"'
"""Script for a shell in a mount namespace of its own, which needs root."""


@attack("surroundings", "ulimit -f: files of at most 0 bytes, 1 KB and 1 MB")
async def limited_file_size(arena: Arena) -> None:
    for size in (0, 1024, 2**20):
        await start_and_judge(arena, f"files of at most {size} bytes", most_file_bytes=size)


@attack("surroundings", "a directory for temporary files that is missing, a file, or has too long a name")
async def temporary_directory(arena: Arena) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        file, long = Path(root) / "file", Path(root) / ("x" * 200)
        file.write_text("")
        long.mkdir()
        for what, path in (("missing", Path(root) / "none"), ("a file", file), ("of a long name", long)):
            await start_and_judge(arena, f"TMPDIR is {what}", env={"TMPDIR": str(path)})


@attack("surroundings", "a directory for temporary files of 16 KB, in a mount namespace (needs root)")
async def tiny_temporary_directory(arena: Arena) -> None:
    if os.geteuid() != 0:
        arena.statuses["not root"] += 1
        return
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        enter = ["unshare", "--mount", "sh", "-c", TINY, root]
        await start_and_judge(arena, "TMPDIR of 16 KB", env={"TMPDIR": root}, enter=enter)


@attack("surroundings", "SIGHUP: a stream that runs ends as if nothing had happened, then the server ends")
async def hangup(arena: Arena) -> None:
    async with started([], {}, [], None) as (process, log):
        match = SERVING.search(await wait_until_serving(arena, process, log, "SIGHUP"))
        if match is None:
            return
        body = {"prompt": "Return the", "max_tokens": 800, "ignore_eos": True, "stream": True}
        payload = request("POST", "/v1/completions", encode(body))
        async with open_stream((match[1], int(match[2])), payload) as (reply, reader):
            last = b""
            async for event in stream_events(reader, reply.headers):
                if not last:
                    process.send_signal(signal.SIGHUP)
                last = event
        arena.expect(last == b"[DONE]", f"after SIGHUP a stream ended with {last[-200:]!r}")
        await wait_until_ended(arena, process, "SIGHUP")
