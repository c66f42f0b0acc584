"""`eagleray bench throughput [MODEL]`: tokens per second of a model that has all its requests at once.

With --routed-experts also the cost of reporting which experts compute each token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eagleray.cli.options import program_options
from eagleray.config.build import build_config
from eagleray.config.flags import add_config_flags
from eagleray.llm import LLM
from eagleray_bench.alternating_runs import AlternatingRuns
from eagleray_bench.commands.flags import (
    add_result_flags,
    add_workload_flags,
    check_result_files,
    options_of,
    workload_from,
)
from eagleray_bench.offline import ThroughputFigures, max_model_len, measure_throughput, vocab_size
from eagleray_bench.report import facts, write_json
from eagleray_bench.routed_experts import RoutedExpertsFigures, measure_routed_experts
from eagleray_bench.workload import make_requests

SECTIONS = ("model", "parallel", "cache", "scheduling", "execution", "recovery", "ray", "observability")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_flags(parser)
    add_result_flags(parser)
    parser.add_argument(
        "--detokenize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make text of the answers, as programs usually want it (default: on)",
    )
    parser.add_argument(
        "--routed-experts",
        action="store_true",
        help="measure with requests that ask which experts compute each token, and with others that do not, in turn",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=AlternatingRuns().count,
        metavar="N",
        help="with --routed-experts: how often each way (default: %(default)s)",
    )
    add_config_flags(parser, sections=SECTIONS)


def run(arguments: argparse.Namespace) -> None:
    check_result_files(arguments)
    options = program_options(arguments, sections=SECTIONS, log_level="warning")
    if arguments.routed_experts:
        options["enable_return_routed_experts"] = True
    runs = AlternatingRuns(count=arguments.rounds)
    workload = workload_from(arguments, seed=build_config(**options).model.seed or 0)
    figures: ThroughputFigures | RoutedExpertsFigures
    with LLM(**options) as llm:
        shapes = workload.within(max_model_len(llm)).shapes()
        if arguments.routed_experts:
            figures = measure_routed_experts(llm, shapes, runs, seed=workload.seed, detokenize=arguments.detokenize)
            print(_compare(figures))
        else:
            requests = make_requests(shapes, vocab_size=vocab_size(llm), seed=workload.seed)
            figures = measure_throughput(llm, requests, detokenize=arguments.detokenize)
            print(_describe(figures))
    if arguments.json:
        write_json(Path(arguments.json), "throughput", options_of(arguments), figures)


def _describe(figures: ThroughputFigures) -> str:
    short = f", {figures.num_short} of them shorter than asked" if figures.num_short else ""
    cached = f", {figures.num_cached_tokens:,} of them from the prefix cache" if figures.num_cached_tokens else ""
    return facts(
        {
            "requests": f"{figures.num_requests}{short}",
            "duration": f"{figures.duration_s:.2f} s",
            "requests/s": f"{figures.requests_per_s:.2f}",
            "output tokens/s": f"{figures.output_tokens_per_s:,.1f}",
            "all tokens/s": f"{figures.total_tokens_per_s:,.1f}",
            "input tokens": f"{figures.num_input_tokens:,}{cached}",
            "output tokens": f"{figures.num_output_tokens:,}",
        }
    )


def _compare(figures: RoutedExpertsFigures) -> str:
    return facts(
        {
            "requests": f"{figures.without[0].num_requests}, {len(figures.without)} times each way",
            "output tokens/s without": ", ".join(f"{one.output_tokens_per_s:,.1f}" for one in figures.without),
            "output tokens/s with": ", ".join(f"{one.output_tokens_per_s:,.1f}" for one in figures.reporting),
            "with / without": f"{figures.ratio:.3f} (median of the rounds)",
            "rows": f"{figures.num_rows:,} of {figures.bytes_per_row} bytes each",
        }
    )
