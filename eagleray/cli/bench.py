"""`eagleray bench`: hands over to `eagleray_bench`, which measures a server, a model or a part of the engine."""

from __future__ import annotations

import argparse
import importlib.util

from eagleray.errors import UserError

REQUIRED = ("aiohttp", "matplotlib")
"""Libraries of the extra `eagleray[bench]`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks' arguments. Raises `UserError` if a library of the extra is not installed."""
    if missing := missing_libraries():
        raise UserError(f"`eagleray bench` needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from eagleray_bench import commands

    commands.add_arguments(parser)


def missing_libraries() -> list[str]:
    return [name for name in REQUIRED if importlib.util.find_spec(name) is None]


def run(arguments: argparse.Namespace) -> int | None:
    from eagleray_bench import commands

    return commands.run(arguments)
