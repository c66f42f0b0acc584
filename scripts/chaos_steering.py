"""Control calls during the load: pauses, sleeps of the cache, and updates with the weights that the server has already.

Such an update changes no answer, whichever engines have applied it and whichever are replaced meanwhile; an engine that
is replaced needs the next one before it serves. Calls are repeated under their id when their API server exits.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import uuid
from collections import Counter
from typing import Any

import httpx
from chaos_server import ChaosFailed

CALL_SECONDS = 90.0
"""Time limit of a call, which engines that are stopped or starting delay."""

STEER_SECONDS = 1.5
"""Average time between two kinds of calls."""

PAUSE_SECONDS = 0.3

REPEAT_SECONDS = 0.2

EXPECTED_STATUSES = (409, 503, 504)
"""A call may find another one unfinished (409), no engine (503), or an engine that does not reply in time (504)."""


class Steering:
    """Makes control calls of alternating kinds until it is cancelled. `url` ends in /v1."""

    def __init__(self, url: str, *, rng: random.Random) -> None:
        self._url = url.removesuffix("/v1")
        self._rng = rng
        self.calls: Counter[str] = Counter()
        """Number of calls by name; a call that failed has its status behind the name."""
        self.trouble: list[str] = []
        """Answers that no fault explains."""

    async def run(self) -> None:
        for steer in itertools.cycle((self._pause, self._update, self._sleep, self._update)):
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * STEER_SECONDS)
            async with self._client() as http:
                await steer(http)

    async def finish(self) -> None:
        """Have the server serve again, with the weights on every engine."""
        deadline = time.monotonic() + CALL_SECONDS
        async with self._client() as http:
            await self._call(http, "/wake_up")
            await self._call(http, "/resume")
            while (states := await self._engine_states(http)) != {"ready"}:
                if time.monotonic() > deadline:
                    self.trouble.append(f"engines do not get ready after the last fault: {sorted(states)}")
                    return
                if "waiting" in states:
                    await self._update(http)
                await asyncio.sleep(REPEAT_SECONDS)

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_keepalive_connections=0)  # any API server may answer
        return httpx.AsyncClient(base_url=self._url, timeout=CALL_SECONDS, limits=limits, trust_env=False)

    async def _pause(self, http: httpx.AsyncClient) -> None:
        await self._call(http, "/pause?mode=keep")
        await asyncio.sleep(PAUSE_SECONDS)
        await self._call(http, "/resume")

    async def _sleep(self, http: httpx.AsyncClient) -> None:
        await self._call(http, "/sleep?level=1&mode=keep&tags=kv_cache")
        await asyncio.sleep(PAUSE_SECONDS)
        await self._call(http, "/wake_up")

    async def _update(self, http: httpx.AsyncClient) -> None:
        models = await self._request(http, "GET", "/v1/models")
        await self._call(http, "/update_weights", {"weight_dir": models.json()["data"][0]["root"]})

    async def _engine_states(self, http: httpx.AsyncClient) -> set[str]:
        info = (await self._request(http, "GET", "/weight_info")).json()
        return {engine["state"] for engine in info["engines"]}

    async def _call(self, http: httpx.AsyncClient, path: str, body: dict[str, Any] | None = None) -> None:
        response = await self._request(http, "POST", path, body)
        name = path.partition("?")[0].lstrip("/")
        if response.status_code == 200:
            self.calls[name] += 1
        elif response.status_code in EXPECTED_STATUSES:
            self.calls[f"{name} ({response.status_code})"] += 1
        else:
            self.trouble.append(f"{path}: {response.status_code} {response.text[:200]}")

    async def _request(
        self, http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """Repeat a request until a server answers. Repetitions of a call have its id, so it is executed once."""
        headers = {"X-Request-Id": uuid.uuid4().hex}
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                return await http.request(method, path, json=body, headers=headers)
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise ChaosFailed(f"no API server answers {path}: {error!r}") from error
                await asyncio.sleep(REPEAT_SECONDS)
