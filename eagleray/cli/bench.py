"""`eagleray bench`: hands over to `eagleray_bench`, which measures a server, a model or a part of the engine."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from eagleray_bench import commands

    commands.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int | None:
    from eagleray_bench import commands

    return commands.run(arguments)
