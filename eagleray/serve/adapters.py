"""Adapters that a replica loads when a request names one by Serve's header for multiplexed models.

Serve keeps the least recently used ones, and prefers replicas that have an adapter when it chooses one for a request.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagleray.config.lora_modules import lora_modules
from eagleray.config.resolve import served_names
from eagleray.config.sections import Config
from eagleray.errors import ConfigError, NotFound, UnknownModel
from eagleray.instance import LocalInstance
from eagleray.log import get_logger
from eagleray.messages.control import LoadAdapter, UnloadAdapter
from eagleray.server.service import chosen_adapter

logger = get_logger(__name__)

FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Names of adapters that may be names of directories."""

FindAdapter = Callable[[str], Awaitable[str]]
"""Returns the directory of an adapter by its name. Raises `UserError` for one that does not exist."""

UNLOAD_SECONDS = 10.0
"""Longest wait for requests that have been given an adapter and were not sent to an engine yet."""


class AdapterSource(msgspec.Struct, frozen=True, kw_only=True):
    """Places of the adapters that may be asked for."""

    directory: str | None = None
    """Directory with an adapter in each subdirectory; the name of the subdirectory is that of the adapter."""
    paths: dict[str, str] = {}
    """Directories of adapters by name."""

    async def find(self, name: str) -> str:
        """Return the directory of an adapter. Raises `UnknownModel`, or `NotFound` if it does not exist."""
        path = self.path_of(name)
        if not await asyncio.to_thread(os.path.isdir, path):
            raise NotFound(f"there is no directory {path} with adapter {name!r}")
        return path

    def path_of(self, name: str) -> str:
        """Return the path of an adapter. Raises `UnknownModel`."""
        if (path := self.paths.get(name)) is not None:
            return path
        if self.directory is not None and FILE_NAME.fullmatch(name):
            return str(Path(self.directory) / name)
        known = f"subdirectories of {self.directory}" if self.directory else ", ".join(self.paths)
        raise UnknownModel(
            f"there is no adapter {name!r}, which the header `serve_multiplexed_model_id` names: name one of "
            f"{known or 'those that are loaded (the application was built without `adapters`)'}"
        )


def adapter_source(given: Any, config: Config) -> AdapterSource:
    """Return the places that the argument `adapters` of `build_app` names. Raises `ConfigError`."""
    if given is None:
        return AdapterSource()
    if not config.lora.enable_lora:
        raise ConfigError("option `adapters` needs `enable_lora`")
    if adapter_capacity(config) < 1:
        raise ConfigError(
            f"option `adapters`: `lora_modules` takes all {config.lora.max_loras} places of `max_loras`: raise that"
        )
    if isinstance(given, str) and given:
        return AdapterSource(directory=given)
    if isinstance(given, Mapping) and all(isinstance(text, str) and text for item in given.items() for text in item):
        return AdapterSource(paths=dict(given))
    raise ConfigError(
        f"option `adapters`: expected a directory, or a mapping of names to directories, but got {given!r}"
    )


def adapter_capacity(config: Config) -> int:
    """Return the number of adapters that requests may load, beside those that are loaded at the start."""
    return config.lora.max_loras - len(lora_modules(config))


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
            if self._instance.client.find_adapter(name) is None:
                await self._find(name)  # raises first, because Serve unloads another adapter before it calls `load`
            await self._load(name)
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
        await self._instance.control(LoadAdapter(name=name, path=await self._find(name)))
        return SimpleNamespace(__del__=partial(self._unload, name))

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
