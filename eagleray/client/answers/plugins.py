"""Formats of tool calls from files of the user, named by the option `tool_parser_plugin`."""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
from pathlib import Path

from eagleray.client.answers.tool_formats import registered_formats
from eagleray.errors import ConfigError


def load_tool_parser_plugin(path: str) -> None:
    """Run the Python file of a plugin, which registers formats. A file that has been loaded is not run again.

    Raises `ConfigError` for a file that cannot be run, or that registers no format.
    """
    _load(Path(path).expanduser().resolve())


@functools.cache
def _load(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"option `tool_parser_plugin`: there is no file {path}")
    name = f"eagleray_tool_parser_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"option `tool_parser_plugin`: expected a Python file (.py), but got {path}")
    before = registered_formats()
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module of their class
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{path}, line {lines[-1]}" if lines else path
        raise ConfigError(
            f"option `tool_parser_plugin`: {place} raised {type(error).__name__}: {error}; docs/tools.md describes "
            "plugins"
        ) from error
    if registered_formats() == before:
        raise ConfigError(
            f"option `tool_parser_plugin`: {path} registers no format: it has to call `register_tool_format` of "
            "eagleray.client.answers.tool_formats with an instance of a `ToolFormat`"
        )
