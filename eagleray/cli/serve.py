"""`eagleray serve [MODEL]`: run the supervisor of engines and API servers until a signal stops it."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import time
from typing import Any

from eagleray.cli.listener import api_url, open_listener
from eagleray.cli.options import server_config
from eagleray.config.api_keys import with_api_keys
from eagleray.config.flags import add_config_flags
from eagleray.config.resolve import served_names
from eagleray.config.sections import Config
from eagleray.fleet.supervisor import Supervisor
from eagleray.fleet.timeouts import FLUSH_SECONDS
from eagleray.log import get_logger
from eagleray.preflight import checked_config
from eagleray.process.open_files import raise_open_files_limit
from eagleray.server.connection_limit import SPARE_FILES, connection_limit
from eagleray.server.tls import load_tls
from eagleray.transport.runtime_dir import check_room

logger = get_logger(__name__)

SECTIONS = (
    "model",
    "parallel",
    "cache",
    "lora",
    "scheduling",
    "execution",
    "recovery",
    "ray",
    "observability",
    "serving",
)

API_SERVER_BYTES = 2**20
"""Space in the instance's directory for the counters of an API server."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C during the start. A server that has served ends with 0."""
SAME_SIGNAL_SECONDS = 0.2
"""Time in which another signal is part of the first one: `timeout` signals the process and then its whole group."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser, sections=SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    config = with_api_keys(server_config(arguments, sections=SECTIONS))
    open_files = raise_open_files_limit(needed=(config.serving.max_connections or 0) + SPARE_FILES)
    connection_limit(config.serving.max_connections, open_files=open_files)
    load_tls(config.serving, warns=True)  # files that do not fit together are an error before processes start
    # here, too: a wrong name is an error at once, and a download takes as long as it takes
    config = checked_config(config)
    if config.model.model is None:
        logger.info("no model was given, so this is the embedded demo model, a toy of a few million parameters")
    with open_listener(config.serving) as listener:
        return asyncio.run(_serve(config, listener))


async def _serve(config: Config, listener: socket.socket) -> int:
    """Serve until a signal comes, and return the exit code. Raises the error of an instance that ends by itself."""
    start = time.monotonic()
    stop_signal = _next_signal(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    supervisor = await _open(config, stop_signal)
    if supervisor is None:
        return _exit_code_of_start(stop_signal)
    grace = 0.0
    try:
        check_room(supervisor.runtime_dir, config.serving.api_server_count * API_SERVER_BYTES)
        supervisor.start_engines()
        supervisor.start_api_servers(listener.fileno())
        serving = asyncio.create_task(supervisor.serving.wait())
        await _first(serving, supervisor.failed, stop_signal)
        if has_served := serving.done():
            name, url = served_names(config.model)[0], api_url(listener, config.serving)
            logger.info("serving %s at %s after %.1f s", name, url, time.monotonic() - start)
            await _first(supervisor.failed, stop_signal)
        serving.cancel()
        if supervisor.failed.done():
            grace = FLUSH_SECONDS
            await supervisor.failed
        if not has_served:
            return _exit_code_of_start(stop_signal)
        grace = config.serving.shutdown_timeout
        logger.info("stopping: running requests get %.0f s to finish; a second signal ends them", grace)
    finally:
        await _stop(supervisor, grace)
    return 0


def _exit_code_of_start(stop_signal: asyncio.Future[signal.Signals]) -> int:
    """Return the exit code for a signal that came before the instance served."""
    return INTERRUPTED if stop_signal.result() is signal.SIGINT else 0


async def _open(config: Config, stop_signal: asyncio.Future[signal.Signals]) -> Supervisor | None:
    """Open a supervisor, which may take long on a cluster. Returns None if a signal came meanwhile."""
    opening = asyncio.create_task(Supervisor.open(config))
    await _first(opening, stop_signal)
    if not opening.done():
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        return None
    return await opening


async def _stop(supervisor: Supervisor, grace: float) -> None:
    """Stop within `grace` seconds, or at once when a second signal comes."""
    # Not SIGHUP: when a terminal is closed, the system and the shell may send one each.
    second_signal = _next_signal(signal.SIGINT, signal.SIGTERM, ignored_seconds=SAME_SIGNAL_SECONDS)
    stopping = asyncio.create_task(supervisor.stop(grace))
    await _first(stopping, second_signal)
    if not stopping.done():
        supervisor.kill()
    await stopping


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of the futures is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _next_signal(*numbers: signal.Signals, ignored_seconds: float = 0.0) -> asyncio.Future[signal.Signals]:
    """Return a future of the first of these signals that arrives, after `ignored_seconds` in which they are ignored. An
    ignored SIGHUP (nohup) stays ignored."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()
    begin = loop.time() + ignored_seconds

    def on_signal(number: signal.Signals) -> None:
        if loop.time() >= begin and not stop.done():
            stop.set_result(number)

    for number in numbers:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal, number)
    return stop
