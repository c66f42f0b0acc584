"""`eagleray scale`: another number of engines or API servers for a running server."""

from __future__ import annotations

import argparse

from eagleray.cli.fleet_operation import (
    ENDED,
    FleetOperation,
    add_operation_flags,
    add_server_flags,
    outcome_line,
    progress_line,
    ranks,
    run_operation,
)
from eagleray.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser)
    parser.add_argument("-dp", "--data-parallel-size", type=int, metavar="N", help="number of engines")
    parser.add_argument(
        "--remove-ranks", type=ranks, metavar="R,R", help="engines that go (default: those of the highest ranks)"
    )
    parser.add_argument("--api-server-count", type=int, metavar="N", help="number of API servers")
    add_operation_flags(parser)
    parser.add_argument("--status", action="store_true", help="print the status of the operation, and change nothing")


def run(arguments: argparse.Namespace) -> int:
    """Scale, printing the progress and the outcome. Returns the exit code: 1 for an operation that failed.

    Raises `UserError` if the server refuses, and `Unavailable` if it does not answer.
    """
    operation = FleetOperation(arguments)
    given = {name: getattr(arguments, name) for name in ("data_parallel_size", "remove_ranks", "api_server_count")}
    fields = {name: value for name, value in given.items() if value is not None}
    if arguments.status:
        if fields:
            raise UserError("--status changes nothing: leave out the numbers, or --status")
        status = operation.status()
        print(outcome_line(status) if status["phase"] in ENDED else progress_line(status))
        return 0
    if not fields:
        raise UserError("name a number to scale to: --data-parallel-size, --remove-ranks or --api-server-count")
    fields["drain_timeout"] = arguments.drain_timeout
    return run_operation(operation, "/scale", fields, waits=not arguments.no_wait)
