"""Formats of tool calls and of reasoning from files of the user, named by options."""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from eagleray.client.answers.reasoning_formats import registered_reasoning_formats
from eagleray.client.answers.tool_formats import registered_formats
from eagleray.errors import ConfigError

PluginOption = Literal["tool_parser_plugin", "reasoning_parser_plugin"]

_REGISTERED: dict[PluginOption, Callable[[], list[object]]] = {
    "tool_parser_plugin": lambda: [*registered_formats()],
    "reasoning_parser_plugin": lambda: [*registered_reasoning_formats()],
}
"""Functions that return the formats that plugins may add to, by the option that names the plugin."""

_CALLS: dict[PluginOption, str] = {
    "tool_parser_plugin": "`register_tool_format` of eagleray.client.answers.tool_formats with an instance of a "
    "`ToolFormat`",
    "reasoning_parser_plugin": "`register_reasoning_format` of eagleray.client.answers.reasoning_formats with a "
    "`MarkedReasoning` or another `ReasoningFormat`",
}


def load_plugin(option: PluginOption, path: str) -> None:
    """Run the Python file of a plugin, which registers formats. A file that has been loaded is not run again.

    Raises `ConfigError` for a file that cannot be run, or that registers no format.
    """
    _load(option, Path(path).expanduser().resolve())


@functools.cache
def _load(option: PluginOption, path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"option `{option}`: there is no file {path}")
    name = f"eagleray_{option}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"option `{option}`: expected a Python file (.py), but got {path}")
    before = _REGISTERED[option]()
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module of their class
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{path}, line {lines[-1]}" if lines else path
        raise ConfigError(
            f"option `{option}`: {place} raised {type(error).__name__}: {error}; docs/tools.md describes plugins"
        ) from error
    if _REGISTERED[option]() == before:
        raise ConfigError(f"option `{option}`: {path} registers no format: it has to call {_CALLS[option]}")
