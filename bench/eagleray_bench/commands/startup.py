"""`eagleray bench startup [MODEL]`: from the start of a program or a server to its first answer."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagleray.cli.options import program_options
from eagleray.config.build import build_config
from eagleray.config.flags import add_config_flags
from eagleray.hub.prepare import prepare_model
from eagleray_bench.commands.flags import add_result_flags, check_result_files, options_of
from eagleray_bench.report import summaries, write_json
from eagleray_bench.startup import KINDS, StartupFigures, measure_startup

SECTIONS = ("model", "parallel", "cache", "scheduling", "execution", "recovery", "ray", "observability")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--what", nargs="+", choices=KINDS, default=list(KINDS), help="a program with `LLM`, a server (default: both)"
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="starts of each (default: 3)")
    add_result_flags(parser)
    add_config_flags(parser, sections=SECTIONS)


def run(arguments: argparse.Namespace) -> None:
    check_result_files(arguments)
    options = program_options(arguments, sections=SECTIONS)
    config = build_config(**options)
    prepare_model(config.model)  # a wrong path is an error now, in this process, and a download is not measured
    timeout = config.execution.startup_timeout
    figures = list(measure_startup(options, kinds=arguments.what, repeat=arguments.repeat, timeout=timeout))
    print(_describe(figures))
    if arguments.json:
        write_json(Path(arguments.json), "startup", options_of(arguments), figures)


def _describe(figures: list[StartupFigures]) -> str:
    rows = {}
    for one in figures:
        rows[f"{one.kind}, ready"] = one.ready_s
        rows[f"{one.kind}, first answer"] = one.answered_s
    return summaries("s", rows)
