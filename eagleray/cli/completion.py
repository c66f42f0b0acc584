"""`eagleray completion SHELL`: a script for bash, zsh or fish that completes commands, options and their values."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator

from eagleray.cli import bench
from eagleray.errors import UserError

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def run(arguments: argparse.Namespace) -> None:
    """Print the script. Raises `UserError` if the library that writes it is not installed."""
    if importlib.util.find_spec("shtab") is None:
        raise UserError("`eagleray completion` needs shtab: pip install shtab")
    print(make_script(arguments.shell))


def make_script(shell: str) -> str:
    """Return the script. Options of `eagleray bench` are in it where that command can run."""
    import shtab

    from eagleray.cli.commands import COMMANDS, make_parser

    parser = make_parser([name for name in COMMANDS if name != "bench" or not bench.missing_libraries()])
    for action in _actions(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if action.dest == "model" or metavar == "FILE":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif metavar.startswith("{"):  # the parser of options checks these values, because vLLM has others too
            action.choices = metavar.strip("{}").split(",")
    script: str = shtab.complete(parser, shell=shell)
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
