"""`eagleray restart --rolling`: new processes, perhaps with other options, for the engines of a running server."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagleray.cli.fleet_operation import FleetOperation, add_operation_flags, add_server_flags, ranks, run_operation
from eagleray.config.flags import add_option_flags
from eagleray.config.restart_options import CHANGEABLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser)
    parser.add_argument(
        "--rolling",
        action="store_true",
        required=True,
        help="one engine after another, so that the others serve; required, because there is no other way",
    )
    parser.add_argument("--ranks", type=ranks, metavar="R,R", default=[], help="engines to restart (default: all)")
    add_operation_flags(parser)
    add_option_flags(
        parser,
        CHANGEABLE,
        "options that all engines have from now on (default: as they are)",
        model_help="checkpoint with the same tokenizer",
    )


def run(arguments: argparse.Namespace) -> int:
    """Restart the engines, printing the progress and the outcome. Returns the exit code: 1 for a failed operation.

    Raises `UserError` if the server refuses, and `Unavailable` if it does not answer.
    """
    operation = FleetOperation(arguments)
    options = {name: value for name in CHANGEABLE if (value := getattr(arguments, name)) is not None}
    if (model := options.get("model")) is not None and Path(model).expanduser().is_dir():
        options["model"] = str(Path(model).expanduser().absolute())  # the server may have another working directory
    fields = {"ranks": arguments.ranks, "drain_timeout": arguments.drain_timeout, "options": options}
    return run_operation(operation, "/restart", fields, waits=not arguments.no_wait)
