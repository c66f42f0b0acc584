"""`eagleray complete`: texts completed by a model of a running server, in the terminal."""

from __future__ import annotations

import argparse

from eagleray.cli.remote import Remote, add_remote_flags
from eagleray.cli.terminal import answer_lines, print_answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_remote_flags(parser)


def run(arguments: argparse.Namespace) -> None:
    remote = Remote(arguments)

    def complete(text: str) -> int:
        print_answer(remote.stream("/completions", {"prompt": text}))
        return remote.num_tokens

    if arguments.quick:
        complete(arguments.quick)
        return
    answer_lines(
        complete, greeting=f"{remote.model} at {remote.url} completes texts. Ctrl-C stops a completion, Ctrl-D ends."
    )
