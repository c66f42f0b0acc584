"""`eagleray restart --rolling`: new processes for the engines of a running server, one after another."""

from __future__ import annotations

import argparse

from eagleray.cli.fleet_operation import FleetOperation, add_operation_flags, add_server_flags, ranks, run_operation


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


def run(arguments: argparse.Namespace) -> int:
    """Restart the engines, printing the progress and the outcome. Returns the exit code: 1 for a failed operation.

    Raises `UserError` if the server refuses, and `Unavailable` if it does not answer.
    """
    operation = FleetOperation(arguments)
    fields = {"ranks": arguments.ranks, "drain_timeout": arguments.drain_timeout}
    return run_operation(operation, "/restart", fields, waits=not arguments.no_wait)
