"""Adapters that requests load into a replica, with stand-ins for Serve's cache and for the instance."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest
import ray

from eagleray.config.build import build_config
from eagleray.messages.control import UnloadAdapter


def multiplexed(*, max_num_models_per_replica: int) -> Callable[[Callable[[str], Awaitable[Any]]], Any]:
    """Keep models as Serve does: it unloads the oldest one for another, and forgets one whose load is cancelled."""

    def decorate(load: Callable[[str], Awaitable[Any]]) -> Callable[[str], Awaitable[Any]]:
        models: dict[str, Any] = {}
        lock = asyncio.Lock()

        async def find(name: str) -> Any:
            async with lock:
                if name not in models:
                    if len(models) >= max_num_models_per_replica:
                        oldest = models.pop(next(iter(models)))
                        if hasattr(oldest, "__del__"):
                            await oldest.__del__()
                    models[name] = await load(name)
            return models[name]

        return find

    return decorate


class Instance:
    """An instance that loads an adapter once `may_load` is set, even if the caller is cancelled."""

    def __init__(self) -> None:
        self.config = build_config(model="base", enable_lora=True)
        self.client = self
        self.loaded: set[str] = set()
        self.has_call = asyncio.Event()
        self.may_load = asyncio.Event()

    def find_adapter(self, name: str) -> str | None:
        return name if name in self.loaded else None

    async def control(self, request: Any) -> None:
        if isinstance(request, UnloadAdapter):
            self.loaded.remove(request.name)
            return
        self.has_call.set()
        try:
            await self.may_load.wait()
        finally:
            self.loaded.add(request.name)


async def find(name: str) -> str:
    return f"/adapters/{name}"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200})


async def ignore(message: Any) -> None:
    """Take a part of the answer."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in for the module `ray.serve`, whose import takes seconds."""
    module: Any = ModuleType("ray.serve")
    module.multiplexed = multiplexed
    monkeypatch.setitem(sys.modules, "ray.serve", module)
    monkeypatch.setattr(ray, "serve", module, raising=False)
    return module


@pytest.fixture
def adapters(serve: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delitem(sys.modules, "eagleray.serve.adapters", raising=False)
    module = importlib.import_module("eagleray.serve.adapters")
    del sys.modules["eagleray.serve.adapters"]  # it has the stand-in
    return module


def test_adapter_cache_cancelled_request_leaves_no_adapter_that_serve_has_forgotten(serve: Any, adapters: Any) -> None:
    async def run() -> set[str]:
        instance = Instance()
        app = adapters.AdapterCache(instance, find, capacity=1).around(answer)

        async def request(name: str) -> None:
            serve.get_multiplexed_model_id = lambda: name
            await app({}, None, ignore)

        first = asyncio.create_task(request("one"))
        await instance.has_call.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        instance.may_load.set()
        await request("one")
        assert instance.loaded == {"one"}
        await request("two")
        return instance.loaded

    assert asyncio.run(run()) == {"two"}
