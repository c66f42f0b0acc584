"""The interface of attacks to the server, the judgement of its answers, and the registry of attacks."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fuzzing.values import encode
from fuzzing.wire import REPLY_SECONDS, Address, Reply, post

MOST_FINDINGS, MOST_OF_A_KIND = 20, 3
ERROR_FIELDS = {"message": str, "type": str, "param": (str, type(None)), "code": (str, int, type(None))}
TYPES = ("invalid_request_error", "requests", "server_error")
MESSAGES_PATH = "/v1/messages"
"""Beginning of the paths whose errors have the form of Anthropic's API."""
MESSAGES_ERROR_FIELDS = {"message": str, "type": str}
MESSAGES_TYPES = (
    "invalid_request_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
    "timeout_error",
)
UNAVAILABLE = (503, 529)
OUR_FAULT = ("internal_error", "request_failed", "engine_failed", "worker_failed")
"""Codes of errors that no request may cause."""


class Arena:
    """A server under attack. `seconds` is the time that an attack without an end of its own has."""

    def __init__(self, address: Address, *, seed: int, seconds: float, case: int | None = None) -> None:
        self.address = address
        self.seed = seed
        self.seconds = seconds
        self.case = case
        """The only case of a random attack to run; None for all."""
        self.statuses: Counter[str] = Counter()
        self.findings: list[str] = []
        self._num_of_kind: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.in_flight: dict[str, float] = {}
        """Running cases by their description, with their start times."""

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def find(self, what: str, *, kind: str = "") -> None:
        """Record a violation. Only the first few of a named kind are kept."""
        self._num_of_kind[kind] += 1
        if kind and self._num_of_kind[kind] > MOST_OF_A_KIND:
            return
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(what)

    def expect(self, is_so: bool, what: str) -> None:
        if not is_so:
            self.find(what)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        what: str,
        *,
        want: tuple[int, ...] = (),
        headers: Mapping[str, str] | None = None,
        seconds: float = REPLY_SECONDS,
    ) -> Reply:
        """Send a well-formed request and judge its answer. `want` has the only correct statuses."""
        payload = body if isinstance(body, bytes) else encode(dict(body))
        since = time.monotonic()
        self.in_flight[what] = since
        try:
            reply = await post(self.address, path, payload, headers=headers, seconds=seconds)
        finally:
            self.in_flight.pop(what, None)
        self.judge(reply, what, path=path, has_timeout=b'"timeout"' in payload)
        if want and reply.status not in want:
            self.find(f"{what}: answered {reply.status}, not {' or '.join(map(str, want))}: {_shown(reply)}")
        return reply

    def judge(
        self, reply: Reply, what: str, *, path: str = "", has_timeout: bool = False, may_be_silent: bool = False
    ) -> None:
        """Record the violations of an answer. `may_be_silent`: the server may close the connection without one."""
        self.statuses[str(reply.status or "none")] += 1
        if reply.status == 0:
            if not may_be_silent or "no whole answer" in reply.trouble:
                self.find(f"{what}: no answer after {reply.seconds:.1f} s: {reply.trouble}")
            return
        if reply.status < 400:
            if any(f'"code":"{code}"'.encode() in reply.body for code in OUR_FAULT):
                self.find(f"{what}: the stream ended with an error that no request may cause: {_shown(reply)}")
            return
        self._judge_error(reply, what, path, has_timeout)

    def _judge_error(self, reply: Reply, what: str, path: str, has_timeout: bool) -> None:
        if trouble := _wrong_form(reply, path):
            found = f"{what}: {reply.status} not in the documented form ({trouble}): {_shown(reply)}"
            self.find(found, kind=f"form of {reply.status}: {trouble}")
        else:
            self.refusals[f"{reply.status} {reply.json()['error']['message'][:200]}"] += 1
        if reply.status in (429, *UNAVAILABLE) and "retry-after" not in reply.headers:
            self.find(f"{what}: {reply.status} without Retry-After: {_shown(reply)}")
        is_allowed = reply.status in UNAVAILABLE or (reply.status == 504 and has_timeout)
        if reply.status >= 500 and not is_allowed:
            self.find(f"{what}: {reply.status}: {_shown(reply)}")


def _wrong_form(reply: Reply, path: str) -> str:
    """Describe how the body of an error differs from the form documented for its path; empty if it does not."""
    is_messages = path.startswith(MESSAGES_PATH)
    fields, types = (MESSAGES_ERROR_FIELDS, MESSAGES_TYPES) if is_messages else (ERROR_FIELDS, TYPES)
    try:
        body = reply.json()
        error = body["error"]
        for name, kind in fields.items():
            if not isinstance(error[name], kind):
                return f"{name} is {error[name]!r}"
        if is_messages and body["type"] != "error":
            return f"type of the body is {body['type']!r}"
    except (ValueError, KeyError, TypeError) as error:
        return repr(error)
    return "" if error["type"] in types else f"type is {error['type']!r}"


def _shown(reply: Reply) -> str:
    return repr(reply.body[-300:].decode(errors="replace")) if reply.body else reply.trouble


@dataclass(frozen=True)
class Attack:
    """A named attack. Random attacks run for a given time; the others finish by themselves."""

    name: str
    group: str
    about: str
    run: Callable[[Arena], Awaitable[None]]
    is_random: bool = False
    open_files: int | None = None
    """Limit of open files of the attack's own server; None if it shares the common one."""

    @property
    def needs_server(self) -> bool:
        """Whether the attack is on a running server, rather than on the start of one."""
        return self.group not in ("checkpoints", "surroundings")


_REGISTERED: dict[str, Attack] = {}


def registered() -> dict[str, Attack]:
    """Return all attacks by name, in the order of their definition."""
    return _REGISTERED


def register(
    name: str,
    group: str,
    about: str,
    run: Callable[[Arena], Awaitable[None]],
    *,
    is_random: bool = False,
    open_files: int | None = None,
) -> None:
    """Add an attack to the registry."""
    assert name not in _REGISTERED, name
    _REGISTERED[name] = Attack(name, group, about, run, is_random, open_files)


def attack(
    group: str, about: str, *, is_random: bool = False, open_files: int | None = None
) -> Callable[[Callable[[Arena], Awaitable[None]]], Callable[[Arena], Awaitable[None]]]:
    """Register a function as the attack with its name, written with hyphens."""

    def add(run: Callable[[Arena], Awaitable[None]]) -> Callable[[Arena], Awaitable[None]]:
        register(run.__name__.replace("_", "-"), group, about, run, is_random=is_random, open_files=open_files)
        return run

    return add
