"""`eagleray bench scheduler`: CPU time that the scheduler takes for a step, and its output to the client, without a
model."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagleray_bench.commands.flags import add_result_flags, check_result_files, options_of
from eagleray_bench.report import table, write_json
from eagleray_bench.scheduling import KINDS, SchedulingFigures, measure_scheduling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        nargs="+",
        type=int,
        default=[1, 32, 256],
        metavar="N",
        help="running requests (default: 1 32 256)",
    )
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="steps measured (default: 2000)")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        help="decode: a token for each request. mixed: and a chunk of a long prompt. routed: with routed experts. "
        "rollout: also with log-probabilities. drafted, undrafted: with speculation by n-grams that are right, or that "
        "are never found (default: all)",
    )
    add_result_flags(parser)


def run(arguments: argparse.Namespace) -> None:
    check_result_files(arguments)
    figures = list(measure_scheduling(num_requests=arguments.requests, steps=arguments.steps, kinds=arguments.kinds))
    print(_describe(figures))
    if arguments.json:
        write_json(Path(arguments.json), "scheduler", options_of(arguments), figures)


def _describe(figures: list[SchedulingFigures]) -> str:
    headings = ["µs", "requests", "tokens", "plan mean", "p50", "apply mean", "p50", "both mean", "p50", "p99"]
    headings += ["send mean", "receive mean"]
    rows = []
    for one in figures:
        numbers = [number for part in (one.plan_us, one.apply_us, one.both_us) for number in (part.mean, part.p50)]
        numbers += [one.both_us.p99, one.send_us.mean, one.receive_us.mean]
        rows.append(
            [one.kind, str(one.num_requests), f"{one.num_tokens:.1f}", *(f"{number:.1f}" for number in numbers)]
        )
    return table(headings, rows)
