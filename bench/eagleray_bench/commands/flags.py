"""Flags that several benchmarks share: the requests, and the files of results."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from typing import Any

from eagleray_bench.report import check_writable
from eagleray_bench.workload import DATASETS, DEFAULT_NUM_PROMPTS, Workload


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of `Workload` but the seed, which some commands use for more than the workload."""
    group = parser.add_argument_group("requests")
    default = Workload()
    group.add_argument(
        "--dataset",
        default=default.dataset,
        metavar="NAME",
        help=f"{', '.join(DATASETS)} (default: %(default)s). random: random tokens in lengths about --random-input-len "
        "and --random-output-len. sharegpt-like: random tokens in log-normal lengths with the means of ShareGPT, 161 "
        "in and 338 out, cut to 4 to 1024. prefix-repetition: prefixes of --prefix-len tokens, each one before "
        "--prefix-uses prompts of --random-input-len",
    )
    group.add_argument(
        "--num-prompts", type=int, metavar="N", help=f"number of requests (default: {DEFAULT_NUM_PROMPTS})"
    )
    for name, help_text in {
        "random-input-len": "tokens of a prompt",
        "random-output-len": "tokens of an answer",
    }.items():
        value = getattr(default, name.replace("-", "_"))
        group.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{help_text} (default: {value})")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=default.random_range_ratio,
        metavar="R",
        help="lengths are drawn between 1 - R and 1 + R times the given ones (default: %(default)s)",
    )
    for name, help_text in {
        "num-prefixes": "prefixes of prefix-repetition",
        "prefix-len": "tokens of each of them",
        "prefix-uses": "prompts that begin with each of them",
    }.items():
        value = getattr(default, name.replace("-", "_"))
        group.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{help_text} (default: {value})")
    group.add_argument(
        "--max-len",
        type=int,
        metavar="N",
        help="prompt and answer together have at most N tokens: longer requests are cut (default for "
        "sharegpt-like: the model's length)",
    )


def workload_from(arguments: argparse.Namespace, *, seed: int) -> Workload:
    """Build the workload. Raises `UserError` for impossible values."""
    names = [field.name for field in fields(Workload) if field.name != "seed"]
    return Workload(seed=seed, **{name: getattr(arguments, name) for name in names})


def add_result_flags(parser: argparse.ArgumentParser, *, plot: bool = False) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--json", metavar="FILE", help="write the figures there too")
    if plot:
        group.add_argument("--plot", metavar="FILE.svg", help="draw the distributions")


def check_result_files(arguments: argparse.Namespace) -> None:
    """Raises `UserError` for result files that cannot be written."""
    check_writable(arguments.json, flag="--json")
    check_writable(getattr(arguments, "plot", None), flag="--plot", suffix=".svg")


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a benchmark for its JSON file: without secrets, as values that JSON has."""
    hidden = {"run", "run_benchmark", "command", "benchmark", "json", "plot", "api_key"}
    return {
        name: str(value) if value == math.inf else value  # JSON has no infinity
        for name, value in vars(arguments).items()
        if name not in hidden and value is not None
    }
