"""`eagleray bench latency [MODEL]`: latency of one request, or one batch, without a server."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from eagleray.cli.options import program_options
from eagleray.config.build import build_config
from eagleray.config.flags import add_config_flags
from eagleray.llm import LLM
from eagleray_bench.commands.flags import add_result_flags, check_result_files, options_of
from eagleray_bench.offline import Latency, LatencyOptions, measure_latency
from eagleray_bench.plot import Panel, write_plot
from eagleray_bench.report import summaries, write_json

HELP = {
    "batch_size": "requests at once",
    "input_len": "tokens of a prompt",
    "output_len": "tokens of an answer",
    "iterations": "times that it is measured",
    "warm_up": "times before that",
}
SECTIONS = ("model", "parallel", "cache", "scheduling", "execution", "recovery", "ray", "observability")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    for name, text in HELP.items():
        default = getattr(LatencyOptions(), name)
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    add_result_flags(parser, plot=True)
    add_config_flags(parser, sections=SECTIONS)


def run(arguments: argparse.Namespace) -> None:
    check_result_files(arguments)
    options = program_options(arguments, sections=SECTIONS, log_level="warning")
    names = [field.name for field in fields(LatencyOptions) if field.name != "seed"]
    given = {name: getattr(arguments, name) for name in names}
    batches = LatencyOptions(seed=build_config(**options).model.seed or 0, **given)
    with LLM(**options) as llm:
        latency = measure_latency(llm, batches)
    figures = latency.figures()
    title = f"{batches.batch_size} x {batches.input_len} tokens in, {batches.output_len} out"
    rows = {
        "time to first token": figures.ttft_ms,
        "time per output token": figures.tpot_ms,
        "end to end": figures.e2e_ms,
    }
    print(f"{title}, {batches.iterations} times\n\n{summaries('ms', rows)}")
    if arguments.json:
        write_json(Path(arguments.json), "latency", options_of(arguments), figures)
    if arguments.plot:
        write_plot(Path(arguments.plot), title, _panels(latency))


def _panels(latency: Latency) -> list[Panel]:
    return [
        Panel("time to first token", "ms", [1e3 * value for value in latency.ttft]),
        Panel("time per output token", "ms", [1e3 * value for value in latency.tpot]),
        Panel("end to end", "ms", [1e3 * value for value in latency.e2e]),
    ]
