"""`eagleray complete`: texts completed by a model of a running server, in the terminal."""

from __future__ import annotations

import argparse

from eagleray.cli.remote import Remote, add_remote_flags
from eagleray.cli.terminal import TypedLines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_remote_flags(parser)


def run(arguments: argparse.Namespace) -> None:
    remote = Remote(arguments)
    for line in [arguments.quick] if arguments.quick else TypedLines("> "):
        for choice in remote.stream("/completions", {"prompt": line}):
            print(choice["text"], end="", flush=True)
        print()
