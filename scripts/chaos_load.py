"""The load: requests of every kind over real HTTP, and their answers.

An answer depends on nothing but its request, which is greedy or has a seed. So the answer to a request that was sent
while processes were killed must equal the answer without faults.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from eagleray_bench.events import EventSplitter

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
"""A request without data for this long hangs."""

SHOWN = 60
"""Characters at the end of a text that differs."""

LOGPROB_TOLERANCE = 1e-3
"""Tolerance for a prefix that was prefilled instead of decoded, which may differ in the last bits."""


@dataclass(frozen=True)
class ChaosRequest:
    """HTTP request of the load."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass
class Choice:
    """Completion, put together from its events."""

    text: str = ""
    reasoning: str = ""
    calls: list[str] = field(default_factory=list)
    """Name and arguments of each tool call."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    rows: bytes = b""
    """Experts that computed each token, if the request asked for them."""
    weight_versions: list[dict[str, Any]] = field(default_factory=list)
    """Spans of tokens with the version of the weights that made them; empty: all are of the checkpoint."""
    arrivals: list[float] = field(default_factory=list)
    """Times at which tokens arrived, by `time.monotonic`; empty without a stream."""


@dataclass
class ChaosAnswer:
    """Whole answer. `num_completion_tokens` is the number in its usage."""

    choices: dict[int, Choice] = field(default_factory=dict)
    num_completion_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())


@dataclass
class ChaosOutcome:
    """Result of a request: its answer, or why it failed."""

    request: ChaosRequest
    answer: ChaosAnswer | None = None
    failure: str | None = None
    began: float = 0.0
    """Time at which the request was sent last, by `time.monotonic`."""
    num_resent: int = 0
    """Times that the request was sent again because its API server exited, which only a client can repair."""


class RequestRefused(Exception):
    """Raised if the server answered, but not with a completion."""


def make_requests(count: int, seed: int, *, routed_experts: bool = False) -> list[ChaosRequest]:
    """Make `count` requests; equal arguments give equal requests. `routed_experts`: all ask for routed experts."""
    requests = [_make(kind, random.Random(f"{seed}/{i}")) for i, kind in zip(range(count), _cycle(), strict=False)]
    if routed_experts:
        for request in requests:
            request.body["routed_experts_format"] = "raw"
            request.body.get("sampling_params", request.body)["return_routed_experts"] = True
    return requests


def _cycle() -> Any:
    while True:
        yield from KINDS


def _make(kind: str, rng: random.Random) -> ChaosRequest:
    prompt = " ".join(rng.choices(WORDS, k=rng.choice((2, 8, 30, 90))))
    body: dict[str, Any] = {"max_tokens": rng.choice((5, 60, 250, 600)), "ignore_eos": True}
    seeded = {"temperature": round(rng.uniform(0.5, 1.0), 2), "seed": rng.randrange(2**40)}
    greedy = {"temperature": 0}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    path, more = KINDS[kind](rng, seeded, greedy)
    body |= more
    if path == GENERATE:
        token_ids = [rng.randrange(3, VOCAB) for _ in range(rng.choice((3, 40, 150)))]
        return ChaosRequest(kind, path, {"token_ids": token_ids, "sampling_params": body, **stream})
    begun = [{"role": "assistant", "content": body.pop("begun")}] if "begun" in body else []
    said = {"messages": [{"role": "user", "content": prompt}, *begun]} if path == CHAT else {"prompt": prompt}
    if body.pop("whole", False):
        stream = {}
    return ChaosRequest(kind, path, {**said, **body, **stream, "return_token_ids": True})


SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["name", "count"],
        "additionalProperties": False,
    },
    "minItems": 4,
}
REGEX = "([a-z]{3,8} ){60,}[a-z]+[.]"
TOOL_NAMES = ("find", "count_all")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA["items"], "strict": True}}
    for name in TOOL_NAMES
]
THINKING = r"(\s*\^[^~]*~)?"
"""Expression of thinking that is a part of the text, where answers are not divided into parts."""
REASONING_START = "^"
"""Start marker of the format in `chaos_reasoning.py`."""
ANSWER_FORMATS = {
    "--tool-call-parser": "hermes",
    "--reasoning-parser": "chaos",
    "--reasoning-parser-plugin": str(Path(__file__).with_name("chaos_reasoning.py")),
}
"""Options of a server to which this load is sent, whatever its model is."""
ENDS = {"ignore_eos": False, "max_tokens": 250, "thinking_token_budget": 20}
"""For requests whose answers end by themselves. Any model may think, because the marker is one of its tokens."""

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
    "schema": lambda rng, seeded, greedy: (
        CHAT,
        seeded | ENDS | {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA}}},
    ),
    "regex": lambda rng, seeded, greedy: (COMPLETIONS, seeded | ENDS | {"structured_outputs": {"regex": REGEX}}),
    "choice": lambda rng, seeded, greedy: (GENERATE, seeded | ENDS | {"structured_outputs": {"choice": WORDS}}),
    "tools": lambda rng, seeded, greedy: (
        CHAT,
        seeded | ENDS | {"tools": TOOLS, "tool_choice": rng.choice(("auto", "required"))},
    ),
    "thinking": lambda rng, seeded, greedy: (
        CHAT,
        seeded
        | ENDS
        | {"begun": REASONING_START, "continue_final_message": True, "add_generation_prompt": False}
        | rng.choice(({}, {"structured_outputs": {"regex": REGEX}})),
    ),
}


async def run_load(
    url: str, requests: Sequence[ChaosRequest], *, concurrency: int, may_have_hit_api_server: Callable[[float], bool]
) -> list[ChaosOutcome]:
    """Send all requests, `concurrency` at a time, and return their outcomes in the same order.

    `may_have_hit_api_server(since)`: whether an API server may have exited since that time of `time.monotonic`.
    """
    outcomes = [ChaosOutcome(request) for request in requests]
    queue = iter(outcomes)
    # A connection for each request: one that is kept belongs to one API server, and would be found broken later.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=SILENCE_SECONDS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False) as http:

        async def send_next() -> None:
            for outcome in queue:
                await _complete(http, outcome, may_have_hit_api_server)

        await asyncio.gather(*(send_next() for _ in range(concurrency)))
    return outcomes


async def _complete(
    http: httpx.AsyncClient, outcome: ChaosOutcome, may_have_hit_api_server: Callable[[float], bool]
) -> None:
    while True:
        began = outcome.began = time.monotonic()
        try:
            outcome.answer = await _send(http, outcome.request)
            return
        except (RequestRefused, httpx.TimeoutException) as error:
            outcome.failure = f"{type(error).__name__}: {error}"
            return
        except httpx.TransportError as error:
            if not may_have_hit_api_server(began):
                outcome.failure = f"the connection broke, and no API server had died: {type(error).__name__}: {error}"
                return
            outcome.num_resent += 1


async def _send(http: httpx.AsyncClient, request: ChaosRequest) -> ChaosAnswer:
    answer = ChaosAnswer()
    if not request.body.get("stream"):
        response = await http.post(request.path, json=request.body)
        if response.status_code != 200:
            raise RequestRefused(f"{response.status_code}: {response.text[:500]}")
        _add(answer, response.json())
        return answer
    async with http.stream("POST", request.path, json=request.body) as response:
        if response.status_code != 200:
            raise RequestRefused(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
        async for event in _events(response):
            if event == b"[DONE]":
                return answer
            _add(answer, json.loads(event), time.monotonic())
    raise RequestRefused("the stream ended without [DONE]")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    splitter = EventSplitter()
    async for part in response.aiter_bytes():
        for event in splitter.feed(part):
            yield event


def _add(answer: ChaosAnswer, event: dict[str, Any], now: float | None = None) -> None:
    """Add the content of an event, or of a whole answer."""
    if "error" in event:
        raise RequestRefused(str(event["error"]))
    for part in event["choices"]:
        choice = answer.choices.setdefault(part["index"], Choice())
        said = part.get("delta") or part.get("message") or {"content": part.get("text")}
        choice.text += said.get("content") or ""
        choice.reasoning += said.get("reasoning") or ""
        for place, call in enumerate(said.get("tool_calls") or []):
            _add_call(choice, call.get("index", place), call["function"])
        choice.token_ids += part.get("token_ids") or []
        choice.logprobs += (part.get("logprobs") or {}).get("token_logprobs") or []
        choice.finish_reason = part.get("finish_reason") or choice.finish_reason
        choice.stop_reason = part.get("stop_reason") if part.get("finish_reason") else choice.stop_reason
        if (experts := part.get("routed_experts")) is not None:
            choice.rows += base64.b64decode(experts["data"])
        choice.weight_versions = part.get("weight_versions") or choice.weight_versions
        if now is not None and part.get("token_ids"):
            choice.arrivals.append(now)
    if usage := event.get("usage"):
        answer.num_completion_tokens = usage["completion_tokens"]


def _add_call(choice: Choice, index: int, function: dict[str, Any]) -> None:
    """Add the name of a tool call, and the part of its arguments, that an event has. Ids of calls are random."""
    if index == len(choice.calls):
        choice.calls.append("")
    choice.calls[index] += (function.get("name") or "") + (function.get("arguments") or "")


def find_differences(expected: ChaosAnswer, got: ChaosAnswer) -> list[str]:
    """Describe the differences between two answers; empty if they are equal."""
    found = []
    if expected.choices.keys() != got.choices.keys():
        found.append(f"choices {sorted(got.choices)} instead of {sorted(expected.choices)}")
    if expected.num_completion_tokens != got.num_completion_tokens:
        found.append(f"usage: {got.num_completion_tokens} tokens instead of {expected.num_completion_tokens}")
    for index, one in expected.choices.items():
        other = got.choices.get(index, Choice())
        found += [f"choice {index}: {what}" for what in find_choice_differences(one, other)]
    return found


def find_choice_differences(expected: Choice, got: Choice) -> list[str]:
    """Describe the differences between two completions; empty if they are equal."""
    found = []
    if expected.token_ids != got.token_ids:
        found.append(f"tokens: {_first_difference(expected.token_ids, got.token_ids)}")
    for name in ("text", "reasoning", "calls", "finish_reason", "stop_reason"):
        if getattr(expected, name) != getattr(got, name):
            pair = getattr(expected, name), getattr(got, name)
            found.append(f"{name}: {str(pair[1])[-SHOWN:]!r} instead of {str(pair[0])[-SHOWN:]!r}")
    if expected.rows != got.rows:
        found.append(f"routed experts: {_first_difference(list(expected.rows), list(got.rows))}")
    if len(expected.logprobs) != len(got.logprobs) or any(
        abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(expected.logprobs, got.logprobs, strict=True)
    ):
        found.append("logprobs")
    return found


def find_broken_constraints(request: ChaosRequest, answer: ChaosAnswer) -> list[str]:
    """Describe finished completions that do not follow the constraint of their request; empty if all do."""
    return [
        f"choice {index} breaks its constraint: {choice.text!r}, calls {choice.calls}"
        for index, choice in answer.choices.items()
        if choice.finish_reason in ("stop", "tool_calls") and not _follows(request.body, choice)
    ]


def _follows(body: dict[str, Any], choice: Choice) -> bool:
    if "response_format" in body:
        records = _parsed(choice.text)
        return isinstance(records, list) and len(records) >= SCHEMA["minItems"] and all(map(_is_record, records))
    if "regex" in body.get("structured_outputs", {}):
        return re.fullmatch(THINKING + REGEX, choice.text) is not None
    arguments = [call.removeprefix(name) for call in choice.calls for name in TOOL_NAMES if call.startswith(name)]
    are_records = all(_is_record(_parsed(text)) for text in arguments) and len(arguments) == len(choice.calls)
    return are_records and (bool(choice.calls) or body.get("tool_choice") != "required")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_record(value: Any) -> bool:
    """Return whether a value follows the schema of the items of `SCHEMA`."""
    match value:
        case {"name": str(name), "count": int(count), **others}:
            return len(name) <= 12 and 0 <= count <= 999 and not others
    return False


def _first_difference(expected: list[int], got: list[int]) -> str:
    pairs = zip(expected, got, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    return (
        f"{len(got)} instead of {len(expected)}, from position {at} on {got[at : at + 5]}, not {expected[at : at + 5]}"
    )
