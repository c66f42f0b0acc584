"""The load generator: sends requests at their times and keeps the outcome of each.

One event loop runs all requests. Whatever can be made before the clock runs, such as bodies, is made before.
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
from eagleray_bench.events import StreamedAnswer, error_message
from eagleray_bench.http_client import HttpClient


class CompletedRequest(NamedTuple):
    """A request that got its whole answer. Times are in seconds of one clock."""

    sent: float
    token_times: list[float]
    """Arrival of each event with tokens; never empty."""
    ended: float
    num_prompt_tokens: int | None
    """Number that the server reported; None if it reported none."""
    num_output_tokens: int | None
    num_cached_tokens: int


class FailedRequest(NamedTuple):
    """A request without a whole answer. `kind` is the same for failures that are counted together."""

    kind: str
    cause: str


RequestOutcome = CompletedRequest | FailedRequest


@dataclass(kw_only=True)
class LoadResult:
    """The outcomes of all requests of a load, in their order, and how the load was generated."""

    outcomes: list[RequestOutcome] = field(default_factory=list)
    duration: float = 0.0
    """Seconds from the first request to the last answer."""
    cpu_share: float = 0.0
    """Processor time of this process over `duration`: near 1, the generator itself is the bottleneck."""
    peak_concurrency: int = 0
    lateness: list[float] = field(default_factory=list)
    """Seconds by which each request was sent after its time, including the wait for the concurrency limit."""


async def send_request(client: HttpClient, path: str, body: bytes, *, timeout: float) -> RequestOutcome:
    """Send one request and follow its answer to the end."""
    answer = StreamedAnswer()

    def on_body(part: bytes) -> None:
        answer.feed(part, time.perf_counter())

    sent = time.perf_counter()
    try:
        reply = await client.post(path, body, timeout=timeout, on_body=on_body)
    except DeadlineExceeded as error:
        return FailedRequest("timed out", str(error))
    except Unavailable as error:
        if not answer.is_done:  # a connection that is closed right after the end is no failure
            return FailedRequest("connection", str(error))
    else:
        if reply.status != 200:
            return FailedRequest(f"HTTP {reply.status}", _refusal(reply.body))
    if (failure := answer.failure) is not None:
        return FailedRequest("bad answer", failure)
    return CompletedRequest(
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
    send_times: Sequence[float],
    max_concurrency: int | None,
    timeout: float,
) -> LoadResult:
    """Send each of `bodies` at its time of `send_times` (seconds, in order), at most `max_concurrency` at once.

    `timeout`: seconds that an answer may take. Raises `UserError` for a limit that is not positive.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise UserError(f"--max-concurrency must be at least 1, but it is {max_concurrency}")
    if not timeout > 0:
        raise UserError(f"--request-timeout must be greater than 0 seconds, but it is {timeout:g}")
    load = LoadResult()
    running = 0
    limit = asyncio.Semaphore(max_concurrency or len(bodies))
    with tqdm(total=len(bodies), desc="requests", disable=None) as bar, _timed(load) as began:

        async def send(body: bytes, send_time: float) -> RequestOutcome:
            nonlocal running
            async with limit:
                load.lateness.append(time.perf_counter() - began - send_time)
                running += 1
                load.peak_concurrency = max(load.peak_concurrency, running)
                outcome = await send_request(client, path, body, timeout=timeout)
                running -= 1
                bar.update()
                return outcome

        async with asyncio.TaskGroup() as group:
            tasks = []
            for body, send_time in zip(bodies, send_times, strict=True):
                if (early := began + send_time - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                tasks.append(group.create_task(send(body, send_time)))
    load.outcomes = [task.result() for task in tasks]
    return load


@contextmanager
def _timed(load: LoadResult) -> Iterator[float]:
    """Measure the block into `load` and give it the time of its beginning."""
    began, cpu = time.perf_counter(), time.process_time()
    yield began
    load.duration = time.perf_counter() - began
    load.cpu_share = (time.process_time() - cpu) / load.duration


def _refusal(body: bytes) -> str:
    """Return the message in the body of an error, in whichever form the server wrote it."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body.decode(errors="replace")[:300] or "without an explanation"
    if isinstance(content, dict):
        content = content.get("error") or content.get("detail") or content
    return error_message(content)
