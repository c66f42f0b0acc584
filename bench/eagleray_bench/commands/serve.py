"""`eagleray bench serve`: loads a server with OpenAI's API, eagleray's or another, and measures its answers."""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import uvloop

from eagleray.cli.api_key import ENVIRONMENT_HELP, client_key
from eagleray.errors import UserError
from eagleray_bench.commands.flags import (
    add_result_flags,
    add_workload_flags,
    check_result_files,
    options_of,
    workload_from,
)
from eagleray_bench.http_client import HttpClient, check_server_url
from eagleray_bench.load import LoadResult, generate_load
from eagleray_bench.plot import write_plot
from eagleray_bench.report import write_json
from eagleray_bench.serving import describe, panels, serving_figures
from eagleray_bench.target import open_target
from eagleray_bench.workload import DEFAULT_VOCAB_SIZE, BenchRequest, Workload, make_requests

WARM_UP_SEED = 2**31
"""Seed of the warm-up's prompts, which differ from the measured ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    server.add_argument(
        "--endpoint",
        default="/v1/completions",
        metavar="PATH",
        help="/v1/completions, with token ids as prompts (default), or /v1/chat/completions, with words",
    )
    server.add_argument("--model", metavar="NAME", help="name of the model (default: the first one that is served)")
    server.add_argument("--api-key", help=ENVIRONMENT_HELP)
    server.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="prompts have token ids below this (default: the model's, if its checkpoint is on this machine, else "
        f"{DEFAULT_VOCAB_SIZE})",
    )
    server.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0, greedy)")
    server.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send `ignore_eos`, so that answers are as long as asked for; not a field of OpenAI's (default: on)",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default=float("inf"), metavar="R", help="requests a second (default: inf)"
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of the gamma distribution of the times between requests: 1 is a Poisson process (default), less "
        "comes in bursts, more comes evenly",
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests at once (default: no limit)")
    load.add_argument(
        "--num-warmups", type=int, default=1, metavar="N", help="requests before the clock runs (default: 1)"
    )
    load.add_argument(
        "--request-timeout", type=float, default=3600.0, metavar="S", help="seconds for an answer (default: 3600)"
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, prompts and times (default: 0)")
    add_workload_flags(parser)
    add_result_flags(parser, plot=True)


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code: 1 if every request failed."""
    check_result_files(arguments)
    workload = workload_from(arguments, seed=arguments.seed)
    send_times = workload.send_times(rate=arguments.request_rate, burstiness=arguments.burstiness)
    if arguments.num_warmups < 0:
        raise UserError(f"--num-warmups must not be negative, but it is {arguments.num_warmups}")
    _allow_many_connections()
    url = check_server_url(arguments.base_url.removesuffix("/").removesuffix("/v1"))
    model, requests, load = uvloop.run(_measure(url, arguments, workload, send_times))
    figures = serving_figures(load, requests)
    print(f"{url}{arguments.endpoint}, model {model}\n\n{describe(figures)}")
    if arguments.json:
        write_json(Path(arguments.json), "serve", options_of(arguments) | {"model": model}, figures)
    if arguments.plot:
        write_plot(Path(arguments.plot), f"{model}, {figures.num_completed} requests", panels(load))
    return 0 if figures.num_completed else 1


async def _measure(
    url: str, arguments: argparse.Namespace, workload: Workload, send_times: list[float]
) -> tuple[str, list[BenchRequest], LoadResult]:
    """Return the model's name, the requests and their outcomes."""
    async with HttpClient(url, api_key=client_key(arguments.api_key)) as client:
        target = await open_target(
            client,
            endpoint=arguments.endpoint,
            model=arguments.model,
            temperature=arguments.temperature,
            ignore_eos=arguments.ignore_eos,
            timeout=arguments.request_timeout,
        )
        vocab_size = arguments.vocab_size or target.model.vocab_size or DEFAULT_VOCAB_SIZE
        shapes = workload.within(target.model.max_model_len).shapes()
        if target.is_chat:
            shapes = (await target.word_lengths()).in_words(shapes)
        for request in make_requests(shapes[: arguments.num_warmups], vocab_size=vocab_size, seed=WARM_UP_SEED):
            await target.send_first(request)
        requests = make_requests(shapes, vocab_size=vocab_size, seed=workload.seed)
        load = await generate_load(
            client,
            target.endpoint,
            [target.body(request) for request in requests],
            send_times=send_times,
            max_concurrency=arguments.max_concurrency,
            timeout=arguments.request_timeout,
        )
    return target.model.name, requests, load


def _allow_many_connections() -> None:
    """Raise the limit of open files, usually 1,024: every request in flight has a connection of its own."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
