"""Adapters that a replica loads when a request names one by Serve's header for multiplexed models.

Serve keeps the least recently used ones, and prefers replicas that have an adapter when it chooses one for a request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagleray.config.resolve import served_names
from eagleray.errors import NotFound
from eagleray.instance import LocalInstance
from eagleray.log import get_logger
from eagleray.messages.control import LoadAdapter, UnloadAdapter
from eagleray.serve.adapter_source import FindAdapter
from eagleray.server.service import chosen_adapter

logger = get_logger(__name__)

UNLOAD_SECONDS = 10.0
"""Longest wait for requests that have been given an adapter and were not sent to an engine yet."""


class AdapterCache:
    """The adapters that requests have loaded into one replica. Used in the replica's event loop."""

    def __init__(self, instance: LocalInstance, find: FindAdapter, *, capacity: int) -> None:
        """`find` is called for an adapter that is not loaded; `capacity`: most adapters that are kept loaded."""
        self._instance = instance
        self._find = find
        self._unsent: Counter[str] = Counter()
        """Number of requests that have been given an adapter and have no answer yet, by the adapter's name."""
        self._changed = asyncio.Event()

        async def load(name: str) -> Any:
            return await self._load_new(name)

        self._load = serve.multiplexed(max_num_models_per_replica=max(1, capacity))(load)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return ASGI middleware that loads the adapter that a request names before `app` gets the request."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            name = serve.get_multiplexed_model_id()
            if not name or name in served_names(self._instance.config.model):
                await app(scope, receive, send)
                return
            await self._ensure_loaded(name)
            release = self._retain(name)

            async def send_answer(message: Message) -> None:
                release()  # the request has been sent to an engine, which keeps the adapter for it
                await send(message)

            token = chosen_adapter.set(name)
            try:
                await app(scope, receive, send_answer)
            finally:
                chosen_adapter.reset(token)
                release()

        return call

    async def _ensure_loaded(self, name: str) -> None:
        """Load an adapter unless it is loaded. Raises `UserError`, and unloads none then."""
        client = self._instance.client
        if client.find_adapter(name) is None:
            await self._find(name)  # raises first, because Serve unloads another adapter before it calls `load`
        # shielded: Serve would forget an adapter whose request is cancelled, while the engines still load it
        await asyncio.shield(asyncio.create_task(self._load(name)))
        if client.find_adapter(name) is None:  # a control route has unloaded it, though Serve keeps it
            await self._load_into_engines(name)

    def _retain(self, name: str) -> partial[None]:
        """Keep an adapter loaded until the returned function is called, which may be repeated."""
        self._unsent[name] += 1
        held = [name]
        return partial(self._release, held)

    def _release(self, held: list[str]) -> None:
        if held:
            self._unsent[held.pop()] -= 1
            self._changed.set()

    async def _load_new(self, name: str) -> Any:
        """Load an adapter, and return the object by whose `__del__` Serve unloads it. An adapter that was loaded by
        other means is used as it is, and stays."""
        if self._instance.client.find_adapter(name) is not None:
            return None
        await self._load_into_engines(name)
        return SimpleNamespace(__del__=partial(self._unload, name))

    async def _load_into_engines(self, name: str) -> None:
        # `load_inplace`: another request may have loaded it meanwhile
        await self._instance.control(LoadAdapter(name=name, path=await self._find(name), load_inplace=True))

    async def _unload(self, name: str) -> None:
        try:
            async with asyncio.timeout(UNLOAD_SECONDS):
                while self._unsent[name]:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logger.warning("adapter %s is unloaded, though %d requests still wait", name, self._unsent[name])
        try:
            await self._instance.control(UnloadAdapter(name))
        except NotFound:
            logger.info("adapter %s was unloaded already", name)
