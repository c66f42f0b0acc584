"""Scale operations during the load: other numbers of engines and API servers, named ranks that go, rolling restarts.

None of them changes an answer. Calls are repeated under their id when their API server exits or leaves.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from typing import Any

import httpx
from chaos_server import ChaosFailed

CALL_SECONDS = 120.0
"""Time for which an API server waits for an operation, which engines that are killed while they start delay."""

ANSWER_SECONDS = CALL_SECONDS + 10.0

SCALE_SECONDS = 4.0
"""Average time between two operations."""

REPEAT_SECONDS = 0.2

MAX_ENGINES, MAX_API_SERVERS = 4, 3

DRAIN_SECONDS = (0.0, 0.0, 2.0)
"""Time limits of drains, one of which is chosen for each operation."""


class Scaling:
    """Scales at random until it is cancelled. `url` ends in /v1."""

    def __init__(self, url: str, *, num_engines: int, num_api_servers: int, rng: random.Random) -> None:
        self._url = url.removesuffix("/v1")
        self._num_engines = num_engines
        self._num_api_servers = num_api_servers
        self._rng = rng
        self.calls: Counter[str] = Counter()
        """Number of operations by name; one that failed has its status behind the name."""
        self.trouble: list[str] = []
        """Answers that no fault explains."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * SCALE_SECONDS)
            await self._disturb()

    async def finish(self) -> None:
        """Have the server run the engines and API servers that it had at first."""
        deadline = time.monotonic() + CALL_SECONDS
        first = range(self._num_engines)
        while (ranks := (await self._status())["participating_ranks"]) != [*first]:
            if time.monotonic() > deadline:
                self.trouble.append(f"the engines are {ranks} and not {[*first]} after the last operation")
                return
            beyond = [rank for rank in ranks if rank not in first]
            await self._scale(data_parallel_size=self._num_engines, remove_ranks=beyond)
        await self._scale(api_server_count=self._num_api_servers)

    async def _disturb(self) -> None:
        match self._rng.choice(["engines", "engines", "ranks", "API servers", "restart"]):
            case "engines":
                await self._scale(data_parallel_size=self._rng.randint(1, MAX_ENGINES))
            case "ranks":
                ranks = (await self._status())["participating_ranks"]
                gone = self._rng.sample(ranks, self._rng.randint(1, len(ranks)))
                await self._scale(remove_ranks=gone, data_parallel_size=self._rng.randint(1, MAX_ENGINES))
            case "API servers":
                await self._scale(api_server_count=self._rng.randint(1, MAX_API_SERVERS))
            case "restart":
                await self._call("restart", "/restart", {"drain_timeout": self._rng.choice(DRAIN_SECONDS)})

    async def _scale(self, **fields: Any) -> None:
        name = " and ".join(sorted(fields))
        await self._call(f"scale {name}", "/scale", fields | {"drain_timeout": self._rng.choice(DRAIN_SECONDS)})

    async def _call(self, name: str, path: str, body: dict[str, Any]) -> None:
        response = await self._request("POST", path, body | {"timeout": CALL_SECONDS})
        if response.status_code in (200, 202):  # 202: its own API server leaves
            self.calls[name] += 1
        elif response.status_code in (400, 503, 504) and self._is_explained(response):
            self.calls[f"{name} ({response.status_code})"] += 1
        else:
            self.trouble.append(f"{path} {body}: {response.status_code} {response.text[:200]}")

    @staticmethod
    def _is_explained(response: httpx.Response) -> bool:
        """Whether a fault explains the answer: a named rank is gone by now, or an engine did not start in time."""
        return response.status_code != 400 or "there is no engine" in response.text

    async def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = (await self._request("GET", "/scale")).json()
        return status

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Repeat a request until a server answers. Repetitions have its id, so it is executed once."""
        headers = {"X-Request-Id": uuid.uuid4().hex}
        deadline = time.monotonic() + CALL_SECONDS
        limits = httpx.Limits(max_keepalive_connections=0)  # any API server may answer
        async with httpx.AsyncClient(
            base_url=self._url, timeout=ANSWER_SECONDS, limits=limits, trust_env=False
        ) as http:
            while True:
                try:
                    return await http.request(method, path, json=body, headers=headers)
                except (httpx.ConnectError, httpx.TimeoutException) as error:
                    if time.monotonic() > deadline:
                        raise ChaosFailed(f"no API server answers {path}: {error!r}") from error
                except httpx.TransportError:  # an API server had accepted the call and exited while it waited
                    deadline = time.monotonic() + CALL_SECONDS
                await asyncio.sleep(REPEAT_SECONDS)
