"""`eagleray bench`: how fast the parts are on this machine."""

from __future__ import annotations

import argparse
import importlib

__all__ = ["add_arguments", "run"]

BENCHMARKS = {"rpc": "round trip of an engine's step to its workers and back, with a model that computes nothing"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, summary in BENCHMARKS.items():
        module = importlib.import_module(f"eagleray.cli.bench_{name}")
        command = benchmarks.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run_benchmark=module.run)


def run(arguments: argparse.Namespace) -> None:
    arguments.run_benchmark(arguments)
