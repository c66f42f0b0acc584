"""`eagleray bench throughput [MODEL]`: tokens a second of a model that has all its requests at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagleray.bench.offline import ThroughputFigures, max_model_len, measure_throughput, vocab_size
from eagleray.bench.report import facts, write_json
from eagleray.bench.workload import make_jobs
from eagleray.cli.bench_flags import (
    add_result_flags,
    add_workload_flags,
    check_result_files,
    options_of,
    workload_from,
)
from eagleray.cli.options import add_config_flags, config_options
from eagleray.config import build_config
from eagleray.llm import LLM

__all__ = ["add_arguments", "run"]

SECTIONS = ("model", "parallel", "cache", "scheduling", "execution", "recovery", "ray")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_flags(parser)
    add_result_flags(parser)
    parser.add_argument(
        "--detokenize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make text of the answers, as programs usually want it (default: on)",
    )
    add_config_flags(parser, sections=SECTIONS)


def run(arguments: argparse.Namespace) -> None:
    check_result_files(arguments)
    options = {"log_level": "warning"} | config_options(arguments, sections=SECTIONS)
    workload = workload_from(arguments, seed=build_config(**options).model.seed or 0)
    with LLM(**options) as llm:
        shapes = workload.within(max_model_len(llm)).shapes()
        jobs = make_jobs(shapes, vocab_size=vocab_size(llm), seed=workload.seed)
        figures = measure_throughput(llm, jobs, detokenize=arguments.detokenize)
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
