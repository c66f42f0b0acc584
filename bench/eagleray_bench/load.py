"""The load generator: sends requests when it is their time, and keeps what became of each.

One event loop. Everything that can be made before the clock runs, bodies for one, is made before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from tqdm import tqdm

from eagleray.errors import DeadlineExceeded, Unavailable, UserError
from eagleray_bench.events import Answer, error_message
from eagleray_bench.http import HttpClient

__all__ = ["Answered", "Failed", "Load", "Outcome", "ask", "generate_load"]


class Answered(NamedTuple):
    """A request that got all of its answer. Times in seconds, of one clock."""

    sent: float
    token_times: list[float]
    """When each event with tokens came; never empty."""
    ended: float
    num_prompt_tokens: int | None
    """As the server counted; None if it did not say."""
    num_output_tokens: int | None
    num_cached_tokens: int


class Failed(NamedTuple):
    """A request that did not. `kind` is what several failures have in common, `cause` is told of the first of them."""

    kind: str
    cause: str


Outcome = Answered | Failed


@dataclass(kw_only=True)
class Load:
    """What came of all requests."""

    outcomes: list[Outcome] = field(default_factory=list)
    duration: float = 0.0
    """Seconds from the first request to the last answer."""
    cpu_share: float = 0.0
    """Processor time of this process over `duration`: near 1, the generator itself is the bottleneck."""
    peak_concurrency: int = 0
    lateness: list[float] = field(default_factory=list)
    """Seconds by which each request was sent after its time. Waiting for others because of a limit counts too."""


async def ask(client: HttpClient, path: str, body: bytes, *, timeout: float) -> Outcome:
    """Send one request and follow its answer to the end."""
    answer = Answer()

    def on_body(chunk: bytes) -> None:
        answer.feed(chunk, time.perf_counter())

    sent = time.perf_counter()
    try:
        reply = await client.post(path, body, timeout=timeout, on_body=on_body)
    except DeadlineExceeded as error:
        return Failed("timed out", str(error))
    except Unavailable as error:
        if not answer.is_done:  # hanging up right after the end is no failure
            return Failed("connection", str(error))
    else:
        if reply.status != 200:
            return Failed(f"HTTP {reply.status}", _refusal(reply.body))
    if (failure := answer.failure) is not None:
        return Failed("bad answer", failure)
    return Answered(
        sent,
        answer.token_times,
        time.perf_counter(),
        answer.num_prompt_tokens,
        answer.num_output_tokens,
        answer.num_cached_tokens,
    )


async def generate_load(
    client: HttpClient,
    path: str,
    bodies: Sequence[bytes],
    *,
    starts: Sequence[float],
    max_concurrency: int | None,
    timeout: float,
) -> Load:
    """Send each of `bodies` at its time of `starts` (seconds, in order), at most `max_concurrency` at once.

    `timeout`: seconds that an answer may take. Raises `UserError` for a limit that is not positive.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise UserError(f"--max-concurrency must be at least 1, but it is {max_concurrency}")
    if not timeout > 0:
        raise UserError(f"--request-timeout must be greater than 0 seconds, but it is {timeout:g}")
    load = Load()
    running = 0
    limit = asyncio.Semaphore(max_concurrency or len(bodies))
    with tqdm(total=len(bodies), desc="requests", disable=None) as bar, _timed(load) as began:

        async def one(body: bytes, start: float) -> Outcome:
            nonlocal running
            async with limit:
                load.lateness.append(time.perf_counter() - began - start)
                running += 1
                load.peak_concurrency = max(load.peak_concurrency, running)
                outcome = await ask(client, path, body, timeout=timeout)
                running -= 1
                bar.update()
                return outcome

        async with asyncio.TaskGroup() as group:
            tasks = []
            for body, start in zip(bodies, starts, strict=True):
                if (early := began + start - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                tasks.append(group.create_task(one(body, start)))
    load.outcomes = [task.result() for task in tasks]
    return load


@contextmanager
def _timed(load: Load) -> Iterator[float]:
    """Gives the time of the beginning."""
    began, cpu = time.perf_counter(), time.process_time()
    yield began
    load.duration = time.perf_counter() - began
    load.cpu_share = (time.process_time() - cpu) / load.duration


def _refusal(body: bytes) -> str:
    """The message in an error's body, of whichever kind."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body.decode(errors="replace")[:300] or "without an explanation"
    if isinstance(content, dict):
        content = content.get("error") or content.get("detail") or content
    return error_message(content)
