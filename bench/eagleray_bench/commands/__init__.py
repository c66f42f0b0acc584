"""`eagleray bench BENCHMARK`: one module for each benchmark, which adds its flags and runs it."""

from __future__ import annotations

import argparse
import importlib

__all__ = ["add_arguments", "run"]

BENCHMARKS = {
    "serve": "load a server with OpenAI's API: throughput, time to first token, time per token",
    "throughput": "tokens a second of a model without a server, all requests at once",
    "latency": "time to first token and time per token of a single request or batch, without a server",
    "startup": "from the start of a program or a server to its first answer",
    "scheduler": "cost of planning and applying a step, without a model",
    "rpc": "round trip of an engine's step to its workers and back, with a model that computes nothing",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, summary in BENCHMARKS.items():
        module = importlib.import_module(f"eagleray_bench.commands.{name}")
        command = benchmarks.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run_benchmark=module.run)


def run(arguments: argparse.Namespace) -> int | None:
    """Run the chosen benchmark and return the exit code: 1 if no request of it succeeded."""
    code: int | None = arguments.run_benchmark(arguments)
    return code
