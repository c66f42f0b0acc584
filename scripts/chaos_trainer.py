"""A trainer that pushes weights to a server while its processes are killed, and repeats what fails as trainers do.

A call is repeated, with the same X-Request-Id, after a broken connection and after a 5xx; other refusals, and calls
that keep failing, end the attempt: it is aborted, and the update is started anew with the same label.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
from chaos_weights import FIRST_LABEL, Labels, Weights

from eagleray.weights import SharedMemorySender

CALL_SECONDS = 60.0
"""Deadline of a call, sent to the server as `timeout`."""

REPLY_SECONDS = 15.0
"""Time after the deadline within which a call must be answered."""

UPDATE_SECONDS = 240.0
"""Time within which an update must be committed, with all its attempts."""

TRAINER_TIMEOUT_SECONDS = 8
"""`--weight-update-timeout`: seconds without a call of the trainer after which an update is aborted."""

MOST_REPEATS = 10
REPEAT_SECONDS = 0.2

STRIKE_SHARE, PAUSE_SHARE, LEAVE_SHARE = 0.3, 0.4, 0.05
"""Shares of calls with a fault, of updates in a pause, and of attempts that the trainer leaves open."""

STRIKE_DELAY_SECONDS = 0.1


class CallFailed(Exception):
    """Raised if a call was refused, or failed in every repetition."""


@dataclass
class TrainerReport:
    committed: int = 0
    attempts: int = 0
    paused: int = 0
    """Attempts in a pause."""
    left_open: int = 0
    """Attempts that the trainer left, so that the server had to abort the update."""
    causes: dict[str, int] = field(default_factory=dict)
    """Numbers of failed calls by the call and the cause."""
    longest_call: float = 0.0
    """Seconds."""
    longest_call_name: str = ""


class Trainer:
    """Pushes the variants one after another, about every `every` seconds.

    `strike` injects a fault; it is called shortly after some calls have begun, at most every `strike_every` seconds, so
    that engines have time to start. A context manager.
    """

    def __init__(
        self,
        url: str,
        variants: Sequence[Weights],
        labels: Labels,
        *,
        every: float,
        strike_every: float,
        rng: random.Random,
        strike: Callable[[], Any],
    ) -> None:
        self._every = every
        self._strike_every = strike_every
        self._rng = rng
        self._strike = strike
        self._labels = labels
        self._stack = ExitStack()
        self._parts = [self._write(variant) for variant in variants]
        """Two `update_info` of each variant, which together have all of its tensors."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # each call may go to another server
        self._http = httpx.AsyncClient(
            base_url=url, limits=limits, timeout=CALL_SECONDS + REPLY_SECONDS, trust_env=False
        )
        self._last_strike = 0.0
        self._strikes: set[asyncio.Task[None]] = set()
        self._is_disturbed = False
        """Whether faults are injected during calls."""
        self._is_stopping = False
        self._number = 0
        self._causes: Counter[str] = Counter()
        self.committed: list[tuple[float, str]] = [(0.0, FIRST_LABEL)]
        """Times, by `time.monotonic`, and labels of the updates that were committed."""
        self.trouble: list[str] = []
        self._report = TrainerReport()

    @property
    def report(self) -> TrainerReport:
        self._report.causes = dict(sorted(self._causes.items()))
        return self._report

    def label_at(self, when: float) -> str:
        """Return the last label whose commit was answered before that time."""
        return next(label for committed, label in reversed(self.committed) if committed < when)

    async def __aenter__(self) -> Trainer:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stack.close()
        await self._http.aclose()

    async def run(self) -> None:
        """Push weights until `stop` is called, and have faults injected during the calls."""
        self._is_disturbed = True
        while not self._is_stopping:
            await asyncio.sleep(self._every * self._rng.uniform(0.5, 1.5))
            await self.push()

    def stop(self) -> None:
        """Stop the faults, and end after the current update."""
        self._is_stopping = True
        self._is_disturbed = False

    async def push(self) -> int:
        """Push the next variant until it is committed. Returns its number."""
        self._number += 1
        label, variant = f"v{self._number}", self._number % len(self._parts)
        self._labels.add(label, variant)
        deadline = time.monotonic() + UPDATE_SECONDS
        while not await self._attempt(label, self._parts[variant]):
            if time.monotonic() > deadline:
                self.trouble.append(f"weights {label} were not committed within {UPDATE_SECONDS:g} s: {self._causes}")
                return variant
            await asyncio.sleep(REPEAT_SECONDS)
        self._report.committed += 1
        return variant

    async def _attempt(self, label: str, parts: Sequence[dict[str, Any]]) -> bool:
        """Try once to push weights. Returns whether they were committed."""
        self._report.attempts += 1
        is_paused = self._rng.random() < PAUSE_SHARE
        self._report.paused += is_paused
        try:
            if is_paused:
                await self._call("/pause?mode=keep")
            return await self._update(label, parts)
        except CallFailed:
            await self._insist("/abort_weight_update")
            return False
        finally:
            if is_paused:
                await self._insist("/resume")

    async def _update(self, label: str, parts: Sequence[dict[str, Any]]) -> bool:
        await self._call("/start_weight_update")
        for part in self._rng.choice((parts, parts[::-1])):
            await self._call("/update_weights", {"update_info": part})
        if self._rng.random() < LEAVE_SHARE and self._is_disturbed:
            await self._leave()
            return False
        answer = await self._call("/finish_weight_update", {"weight_version": label})
        if answer["weight_version"] != label:
            self.trouble.append(f"finish_weight_update for {label} answered {answer}")
        self.committed.append((time.monotonic(), label))
        return True

    async def _leave(self) -> None:
        """Make no call until the server has aborted the update by itself."""
        self._report.left_open += 1
        deadline = time.monotonic() + TRAINER_TIMEOUT_SECONDS + REPLY_SECONDS
        while (await self._call("/weight_info", method="GET"))["state"] == "updating":
            if time.monotonic() > deadline:
                self.trouble.append("an update stayed open although its trainer made no call")
                return
            await asyncio.sleep(1)

    async def wait_until_ready(self, *, num_engines: int, seconds: float) -> None:
        """Wait until every engine has the weights that are required, and the instance serves."""
        deadline = time.monotonic() + seconds
        while True:
            info = await self._call("/weight_info", method="GET")
            is_ready = [engine["state"] for engine in info["engines"]] == ["ready"] * num_engines
            if is_ready and info["update"] == info["required"] and info["state"] == "serving":
                return
            if time.monotonic() > deadline:
                self.trouble.append(f"not all engines had the weights {seconds:g} s after the last update: {info}")
                return
            await asyncio.sleep(1)

    async def _insist(self, path: str) -> None:
        """Make a call that must succeed in the end."""
        try:
            await self._call(path)
        except CallFailed as error:
            self.trouble.append(str(error))

    async def _call(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> dict[str, Any]:
        """Make a call, and repeat it after a broken connection or a 5xx. Raises `CallFailed`."""
        name = path.partition("?")[0].removeprefix("/")
        operation_id = secrets.token_hex(8)
        cause = ""
        for _ in range(MOST_REPEATS):
            if method == "POST":
                self._strike_perhaps()
            began = time.monotonic()
            try:
                response = await self._http.request(
                    method,
                    f"{path}{'&' if '?' in path else '?'}timeout={CALL_SECONDS:g}",
                    json=body,
                    headers={"X-Request-Id": operation_id},
                )
            except httpx.TimeoutException:
                self.trouble.append(f"{name} was not answered within {CALL_SECONDS + REPLY_SECONDS:g} s")
                raise CallFailed(f"{name} hangs") from None
            except httpx.TransportError as error:
                cause = f"the connection broke ({type(error).__name__})"
            else:
                if response.status_code == 200:
                    answer: dict[str, Any] = response.json()
                    return answer
                error_body = response.json()["error"]
                cause = f"{response.status_code} {error_body['code']}"
                message = error_body["message"]
                if response.status_code < 500:
                    self._causes[f"{name}: {cause}"] += 1
                    raise CallFailed(f"{name}: {cause}: {message}")
            finally:
                self._note_duration(name, time.monotonic() - began)
            self._causes[f"{name}: {cause}"] += 1
            await asyncio.sleep(REPEAT_SECONDS)
        raise CallFailed(f"{name}: {cause}, {MOST_REPEATS} times")

    def _note_duration(self, name: str, seconds: float) -> None:
        if seconds > self._report.longest_call:
            self._report.longest_call, self._report.longest_call_name = round(seconds, 2), name

    def _strike_perhaps(self) -> None:
        """Schedule a fault with a probability of `STRIKE_SHARE`, unless the last one was a short time ago."""
        is_early = time.monotonic() < self._last_strike + self._strike_every
        if is_early or not self._is_disturbed or self._rng.random() >= STRIKE_SHARE:
            return
        self._last_strike = time.monotonic()

        async def strike() -> None:
            await asyncio.sleep(self._rng.uniform(0.0, STRIKE_DELAY_SECONDS))
            await self._strike()

        task = asyncio.create_task(strike())
        self._strikes.add(task)
        task.add_done_callback(self._strikes.discard)

    def _write(self, weights: Weights) -> list[dict[str, Any]]:
        half = len(weights) // 2
        senders = [self._stack.enter_context(SharedMemorySender()) for _ in range(2)]
        return [sender.write(part) for sender, part in zip(senders, (weights[:half], weights[half:]), strict=True)]
