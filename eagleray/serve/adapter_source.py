"""Places of the adapters that requests may name. Does not import Ray Serve."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from eagleray.config.lora_modules import lora_modules
from eagleray.config.sections import Config
from eagleray.errors import ConfigError, NotFound, UnknownModel

FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Names of adapters that may be names of directories."""

FindAdapter = Callable[[str], Awaitable[str]]
"""Returns the directory of an adapter by its name. Raises `UserError` for one that does not exist."""


class AdapterSource(msgspec.Struct, frozen=True, kw_only=True):
    """Places of the adapters that requests may name."""

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
        known = f"the subdirectories of {self.directory}" if self.directory else ", ".join(self.paths)
        raise UnknownModel(
            f"there is no adapter {name!r}, which the header `serve_multiplexed_model_id` names: name one of "
            f"{known or 'the loaded adapters (the application was built without `adapters`)'}"
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
    """Return the number of adapters that requests may load. Those of `lora_modules` take the other places."""
    return config.lora.max_loras - len(lora_modules(config))
