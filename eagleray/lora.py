"""Low-rank adapters of an instance inside of a program: `LoRARequest`s, and the adapters that they name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagleray.client.client import Client
from eagleray.errors import InvalidRequest, NotFound
from eagleray.messages.adapters import Adapter
from eagleray.messages.control import ControlRequest, LoadAdapter, UnloadAdapter


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter in PEFT's format. vLLM's class of this name may be passed instead, since it has the same
    attributes."""

    lora_name: str
    lora_int_id: int
    """Number by which the program removes the adapter. The program chooses it."""
    lora_path: str = ""
    """Directory of the adapter; may be empty if the adapter is loaded."""
    load_inplace: bool = False
    """Whether it replaces a loaded adapter of the same name."""


LoraLike = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or an adapter or None for each."""


class LoraRequests:
    """The adapters of an instance that this program loads. `control` executes a control call. Used in the instance's
    event loop."""

    def __init__(self, client: Client, control: Callable[[ControlRequest], Awaitable[dict[str, Any]]]) -> None:
        self._client = client
        self._control = control
        self._names: dict[int, str] = {}
        self._loading = asyncio.Lock()

    async def add(self, request: Any) -> bool:
        """Load an adapter on all engines, or replace one. Returns False if it is loaded already, from the same
        directory."""
        async with self._loading:
            return await self._add(request)

    async def remove(self, lora_id: int) -> bool:
        """Unload an adapter. Returns False if no adapter of this number is loaded."""
        async with self._loading:
            name = self._names.pop(lora_id, None)
            if name is None:
                return False
            try:
                await self._control(UnloadAdapter(name))
            except NotFound:
                return False
            return True

    def ids(self) -> set[int]:
        """Return the numbers of the adapters that are loaded."""
        loaded = {adapter.name for adapter in self._client.state.adapters}
        return {lora_id for lora_id, name in self._names.items() if name in loaded}

    async def find(self, request: Any | None) -> Adapter | None:
        """Return the adapter that a request for generation names. Load it first if necessary."""
        if request is None:
            return None
        async with self._loading:
            adapter = self._client.find_adapter(request.lora_name)
            if adapter is None or (request.lora_path and adapter.path != request.lora_path):
                await self._add(request)
                adapter = self._client.find_adapter(request.lora_name)
            return adapter

    async def _add(self, request: Any) -> bool:
        name, path = request.lora_name, request.lora_path
        if self._names.get(request.lora_int_id, name) != name:
            raise InvalidRequest(
                f"`lora_int_id` {request.lora_int_id} is that of adapter {self._names[request.lora_int_id]!r}; give "
                f"{name!r} another",
                param="lora_int_id",
            )
        load_inplace = bool(getattr(request, "load_inplace", False))
        loaded = self._client.find_adapter(name)
        if loaded is not None and loaded.path == path and not load_inplace:
            self._names[request.lora_int_id] = name
            return False
        await self._control(LoadAdapter(name=name, path=path, load_inplace=load_inplace))
        self._names[request.lora_int_id] = name
        return True
