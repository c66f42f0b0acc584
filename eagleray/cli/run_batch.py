"""`eagleray run-batch -i FILE -o FILE [MODEL]`: answer a file of requests without a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from typing import IO

from eagleray.batch.locations import local_output, opened_input
from eagleray.batch.output_file import OutputFile
from eagleray.batch.run import Batch
from eagleray.cli.options import program_options
from eagleray.config.flags import add_config_flags
from eagleray.config.log_config import set_up_log
from eagleray.config.sections import Config
from eagleray.engine_args import EngineArgs
from eagleray.errors import ConfigError
from eagleray.instance import LocalInstance
from eagleray.log import get_logger
from eagleray.metrics.ledger import Ledger
from eagleray.progress import Progress
from eagleray.server.app import create_app

logger = get_logger(__name__)

SECTIONS = ("model", "parallel", "cache", "lora", "scheduling", "execution", "recovery", "ray", "observability")

ROWS_PER_SEQUENCE = 2
"""Rows that are sent for each sequence that the engines may run, so that they always have waiting ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object a line: a path or a URL"
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers, appended one a line: a path or a URL; rows that have one already are not sent again",
    )
    parser.add_argument(
        "--max-concurrency", type=int, metavar="N", help="rows that are sent at the same time (default: as needed)"
    )
    parser.add_argument("--no-progress", action="store_true", help="show no bar and no lines about progress")
    add_config_flags(parser, sections=SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if every row has an answer, also one that is an error."""
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ConfigError(f"`--max-concurrency` must be at least 1, but it is {arguments.max_concurrency}")
    with contextlib.ExitStack() as stack:
        rows = stack.enter_context(opened_input(arguments.input_file))
        path = stack.enter_context(local_output(arguments.output_file))
        output = stack.enter_context(contextlib.closing(OutputFile.open(path, name=arguments.output_file)))
        config = EngineArgs(**program_options(arguments, sections=SECTIONS)).config()
        set_up_log("run-batch", config)
        progress = Progress("rows", is_shown=not arguments.no_progress)
        stack.callback(progress.close)
        concurrency = arguments.max_concurrency or _default_concurrency(config)
        try:
            asyncio.run(_run(config, rows, output, concurrency, progress))
        finally:
            logger.info("%s", progress.describe())
    return 0


def _default_concurrency(config: Config) -> int:
    running = config.scheduling.max_num_seqs * config.parallel.data_parallel_size
    return min(ROWS_PER_SEQUENCE * running, config.serving.max_queued_requests)


async def _run(config: Config, rows: IO[bytes], output: OutputFile, concurrency: int, progress: Progress) -> None:
    """Start the engines, answer all rows, and stop the engines."""
    instance = await LocalInstance.start(config, None)
    try:
        with contextlib.closing(Ledger.open(instance.supervisor.runtime_dir / "metrics", 0)) as ledger:
            app = create_app(instance.client, config, ledger)
            batch = Batch(app, output, max_row_bytes=config.serving.max_request_bytes, progress=progress)
            await instance.guard(batch.run(rows, concurrency))
    finally:
        await instance.stop()
