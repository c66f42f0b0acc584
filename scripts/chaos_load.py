"""The load: requests of every kind over real HTTP, and what came back of each.

A request's answer depends on nothing but the request: it is greedy or has a seed. So one that was sent while processes
died must have the same answer as one that was not disturbed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "engine",
    "token",
    "river",
    "stone",
    "light",
    "under",
    "over",
    "seven",
    "green",
    "walks",
    "sleeps",
    "model",
    "answer",
    "cold",
]
VOCAB = 256
"""Token ids below this are in every model's vocabulary."""

SILENCE_SECONDS = 120.0
"""A request that says nothing for so long hangs."""

LOGPROB_TOLERANCE = 1e-3
"""A prefix that is computed at once may differ from one that was decoded, in the last bits."""


@dataclass(frozen=True)
class Job:
    """One request."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass
class Choice:
    """One completion, put together from its events."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    rows: bytes = b""
    """Which experts computed each token, if that was asked for."""
    arrivals: list[float] = field(default_factory=list)
    """When tokens came, by `time.monotonic`; empty without a stream."""


@dataclass
class Answer:
    """All of it. `num_completion_tokens` is what its usage says."""

    choices: dict[int, Choice] = field(default_factory=dict)
    num_completion_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())


@dataclass
class Outcome:
    """What became of one job."""

    job: Job
    answer: Answer | None = None
    failure: str | None = None
    num_resent: int = 0
    """Its API server died: the one thing that a client must mend itself."""


class Refused(Exception):
    """The server answered, but not with a completion."""


def make_jobs(count: int, seed: int, *, routed_experts: bool = False) -> list[Job]:
    """The same arguments make the same jobs. `routed_experts`: all ask which experts computed their tokens."""
    jobs = [_make(kind, random.Random(f"{seed}/{i}")) for i, kind in zip(range(count), _cycle(), strict=False)]
    if routed_experts:
        for job in jobs:
            job.body["routed_experts_format"] = "raw"
            job.body.get("sampling_params", job.body)["return_routed_experts"] = True
    return jobs


def _cycle() -> Any:
    while True:
        yield from KINDS


def _make(kind: str, rng: random.Random) -> Job:
    prompt = " ".join(rng.choices(WORDS, k=rng.choice((2, 8, 30, 90))))
    body: dict[str, Any] = {"max_tokens": rng.choice((5, 60, 250, 600)), "ignore_eos": True}
    seeded = {"temperature": round(rng.uniform(0.5, 1.0), 2), "seed": rng.randrange(2**40)}
    greedy = {"temperature": 0}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    path, more = KINDS[kind](rng, seeded, greedy)
    body |= more
    if path == GENERATE:
        token_ids = [rng.randrange(3, VOCAB) for _ in range(rng.choice((3, 40, 150)))]
        return Job(kind, path, {"token_ids": token_ids, "sampling_params": body, **stream})
    said = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    if body.pop("whole", False):
        stream = {}
    return Job(kind, path, {**said, **body, **stream, "return_token_ids": True})


COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"

Fields = dict[str, Any]
KINDS: dict[str, Callable[[random.Random, Fields, Fields], tuple[str, Fields]]] = {
    "greedy": lambda rng, seeded, greedy: (COMPLETIONS, greedy),
    "seeded": lambda rng, seeded, greedy: (COMPLETIONS, seeded | {"top_p": 0.9, "top_k": 40}),
    "tokens": lambda rng, seeded, greedy: (GENERATE, greedy),
    "penalties": lambda rng, seeded, greedy: (
        GENERATE,
        seeded | {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    ),
    "two": lambda rng, seeded, greedy: (COMPLETIONS, seeded | {"n": 2}),
    "logprobs": lambda rng, seeded, greedy: (COMPLETIONS, rng.choice((seeded, greedy)) | {"logprobs": 3}),
    "stop": lambda rng, seeded, greedy: (CHAT, seeded | {"stop": [" the", "er"], "ignore_eos": False}),
    "whole": lambda rng, seeded, greedy: (COMPLETIONS, seeded | {"whole": True, "min_tokens": 5, "ignore_eos": False}),
}


async def run_load(
    url: str, jobs: Sequence[Job], *, concurrency: int, api_server_was_hit: Callable[[float], bool]
) -> list[Outcome]:
    """Send all jobs, `concurrency` at a time. The outcomes are in the order of the jobs.

    `api_server_was_hit(since)`: whether an API server may have died since that time of `time.monotonic`.
    """
    outcomes = [Outcome(job) for job in jobs]
    queue = iter(outcomes)
    # A connection for each request: one that is kept belongs to one API server, and would be found broken later.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=SILENCE_SECONDS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False) as http:

        async def take() -> None:
            for outcome in queue:
                await _complete(http, outcome, api_server_was_hit)

        await asyncio.gather(*(take() for _ in range(concurrency)))
    return outcomes


async def _complete(http: httpx.AsyncClient, outcome: Outcome, api_server_was_hit: Callable[[float], bool]) -> None:
    while True:
        began = time.monotonic()
        try:
            outcome.answer = await _send(http, outcome.job)
            return
        except (Refused, httpx.TimeoutException) as error:
            outcome.failure = f"{type(error).__name__}: {error}"
            return
        except httpx.TransportError as error:
            if not api_server_was_hit(began):
                outcome.failure = f"the connection broke, and no API server had died: {type(error).__name__}: {error}"
                return
            outcome.num_resent += 1


async def _send(http: httpx.AsyncClient, job: Job) -> Answer:
    answer = Answer()
    if not job.body.get("stream"):
        response = await http.post(job.path, json=job.body)
        if response.status_code != 200:
            raise Refused(f"{response.status_code}: {response.text[:500]}")
        _take(answer, response.json())
        return answer
    async with http.stream("POST", job.path, json=job.body) as response:
        if response.status_code != 200:
            raise Refused(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
        async for event in _events(response):
            if event == b"[DONE]":
                return answer
            _take(answer, json.loads(event), time.monotonic())
    raise Refused("the stream ended without [DONE]")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Not by `aiter_lines`, which takes more for the end of a line than a line feed."""
    received = b""
    async for data in response.aiter_bytes():
        *events, received = (received + data).split(b"\n\n")
        for event in events:
            yield event.removeprefix(b"data: ")


def _take(answer: Answer, event: dict[str, Any], now: float | None = None) -> None:
    """Add what an event, or a whole answer, says."""
    if "error" in event:
        raise Refused(str(event["error"]))
    for part in event["choices"]:
        choice = answer.choices.setdefault(part["index"], Choice())
        said = part.get("delta") or part.get("message") or {"content": part.get("text")}
        choice.text += said.get("content") or ""
        choice.token_ids += part.get("token_ids") or []
        choice.logprobs += (part.get("logprobs") or {}).get("token_logprobs") or []
        choice.finish_reason = part.get("finish_reason") or choice.finish_reason
        choice.stop_reason = part.get("stop_reason") if part.get("finish_reason") else choice.stop_reason
        if (experts := part.get("routed_experts")) is not None:
            choice.rows += base64.b64decode(experts["data"])
        if now is not None and part.get("token_ids"):
            choice.arrivals.append(now)
    if usage := event.get("usage"):
        answer.num_completion_tokens = usage["completion_tokens"]


def differences(expected: Answer, got: Answer) -> list[str]:
    """In what the two differ; empty if they are the same."""
    found = []
    if expected.choices.keys() != got.choices.keys():
        found.append(f"choices {sorted(got.choices)} instead of {sorted(expected.choices)}")
    if expected.num_completion_tokens != got.num_completion_tokens:
        found.append(f"usage: {got.num_completion_tokens} tokens instead of {expected.num_completion_tokens}")
    for index, one in expected.choices.items():
        other = got.choices.get(index, Choice())
        if one.token_ids != other.token_ids:
            found.append(f"tokens of choice {index}: {_first_difference(one.token_ids, other.token_ids)}")
        for name in ("text", "finish_reason", "stop_reason"):
            if getattr(one, name) != getattr(other, name):
                found.append(f"{name} of choice {index}: {getattr(other, name)!r} instead of {getattr(one, name)!r}")
        if one.rows != other.rows:
            found.append(f"routed experts of choice {index}: {_first_difference(list(one.rows), list(other.rows))}")
        if len(one.logprobs) != len(other.logprobs) or any(
            abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(one.logprobs, other.logprobs, strict=True)
        ):
            found.append(f"logprobs of choice {index}")
    return found


def _first_difference(expected: list[int], got: list[int]) -> str:
    pairs = zip(expected, got, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    return (
        f"{len(got)} instead of {len(expected)}, from position {at} on {got[at : at + 5]}, not {expected[at : at + 5]}"
    )
