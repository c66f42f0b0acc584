"""The commands: one module for each, of which only the one that runs is imported. Driven by `cli.main`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Collection, Sequence

import eagleray
from eagleray.cli.api_key import hide_api_keys
from eagleray.cli.command_parser import CommandParser
from eagleray.config.suggestions import suggest
from eagleray.errors import EagleRayError, UserError
from eagleray.log import report_failure

COMMANDS = {
    "serve": "serve a model over HTTP, with the API of OpenAI",
    "generate": "complete prompts with a model, without a server",
    "run-batch": "answer a file of requests, without a server",
    "chat": "talk to a model of a running server",
    "complete": "complete texts with a model of a running server",
    "top": "show a running server live in the terminal",
    "scale": "change the number of engines and API servers of a running server",
    "restart": "restart the engines of a running server, one after another",
    "bench": "measure a server, a model or a part",
    "completion": "print a script that completes eagleray's commands and options in a shell",
    "collect-env": "print versions, processor, memory and kernels of this machine",
}

COMMAND_MEANINGS = {
    "run": "serve",
    "start": "serve",
    "server": "serve",
    "api-server": "serve",
    "batch": "run-batch",
    "run_batch": "run-batch",
    "infer": "generate",
    "talk": "chat",
    "benchmark": "bench",
    "monitor": "top",
    "dashboard": "top",
    "status": "top",
    "scale-elastic-ep": "scale",
    "reload": "restart",
    "collect_env": "collect-env",
    "env": "collect-env",
}
"""Commands that words of other programs mean."""


def run(arguments: Sequence[str]) -> int:
    """Run a command. Returns the exit code: 0, 1 for a failure, 2 for a mistake in the arguments or options."""
    if not hide_api_keys(arguments):
        print("eagleray: warning: others on this host can read the API key on the command line", file=sys.stderr)
    try:
        options = _parse(arguments)
        return int(options.run(options) or 0)
    except UserError as error:
        report_failure(f"error: {error}")
        return 2
    except EagleRayError as error:
        report_failure(str(error))
        return 1
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        sys.stderr.close()
        return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    chosen = _command(arguments)
    return make_parser([chosen] if chosen else []).parse(arguments)


def make_parser(chosen: Collection[str]) -> CommandParser:
    """Return the parser of all commands, with the options of the chosen ones. Raises `UserError` if one of these needs
    a library that is not installed."""
    parser = CommandParser(prog="eagleray", description=eagleray.__doc__)
    parser.add_argument("--version", action="version", version=eagleray.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name in chosen:
            module = importlib.import_module(f"eagleray.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _command(arguments: Sequence[str]) -> str | None:
    """Return the command that is named. Raises `UserError` for one that does not exist, and for none."""
    if not arguments:
        raise UserError(f"name a command: {', '.join(COMMANDS)}; `eagleray COMMAND --help` lists its options")
    command = arguments[0]
    if command in COMMANDS or command.startswith("-"):
        return command
    meant = suggest(command, COMMANDS, COMMAND_MEANINGS, cutoff=0.6)
    raise UserError(
        f"there is no command {command!r}; "
        + (f"did you mean `eagleray {meant}`?" if meant else f"there are {', '.join(COMMANDS)}")
    )
