"""`eagleray top`: a running server live in the terminal, as its page /dashboard shows it."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from eagleray.cli.api_key import ENVIRONMENT_HELP
from eagleray.cli.keys import CTRL_C, pressed_keys
from eagleray.cli.state_stream import StateStream
from eagleray.errors import EagleRayError, Unavailable, UserError
from eagleray.server.dashboard.state import DashboardState

RETRY_SECONDS = 1.0
KEY_POLL_SECONDS = 0.1
NUM_RATES = 300
PLAIN_COLUMNS = 120
"""Width of a snapshot that is written to a file or a pipe."""

News = DashboardState | EagleRayError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://localhost:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", help=ENVIRONMENT_HELP)


def run(arguments: argparse.Namespace) -> None:
    """Show the server until q or Ctrl-C; print one snapshot if the output is no terminal that can be redrawn.

    Raises `UserError` if the server refuses or the library of the extra is not installed, and `Unavailable` if the
    server does not answer at first. Later it is asked again.
    """
    if importlib.util.find_spec("rich") is None:
        raise UserError("`eagleray top` needs rich: pip install rich")
    stream = StateStream(arguments)
    if not (sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")):
        _print_snapshot(stream)
        return
    states = iter(stream)
    first = next(states, None)
    if first is None:
        raise Unavailable(f"the server at {stream.url} is stopping")
    _Screen(stream, first, states).show()


def _print_snapshot(stream: StateStream) -> None:
    from rich.console import Console

    from eagleray.cli.top_view import render

    state = None
    for newer in itertools.islice(stream, 2):  # rates need two
        state = newer if state is None else _with_experts(newer, state)
    if state is None:
        raise Unavailable(f"the server at {stream.url} is stopping")
    console = Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS, highlight=False, no_color=True)
    console.print(render(state, [], width=console.width, height=None))


class _Screen:
    """The terminal while states are shown in it. A thread reads them, so that keys have an effect at once."""

    def __init__(self, stream: StateStream, first: DashboardState, states: Iterator[DashboardState]) -> None:
        self._stream = stream
        self._state = first
        self._rates = deque([first.traffic.generation_tokens_per_second or 0.0], NUM_RATES)
        self._problem = ""
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(states,), daemon=True, name="states")

    def show(self) -> None:
        from rich.console import Console
        from rich.live import Live

        from eagleray.cli.top_view import render

        console, size = Console(highlight=False), None
        self._reader.start()
        with (
            pressed_keys() as read_key,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while read_key(KEY_POLL_SECONDS if size else 0.0) not in ("q", "Q", CTRL_C):
                if self._take_news() or console.size != size:
                    size = console.size
                    lines = render(
                        self._state, [*self._rates], width=size.width, height=size.height, problem=self._problem
                    )
                    live.update(lines, refresh=True)

    def _read(self, states: Iterator[DashboardState]) -> None:
        is_stopping = False
        while True:
            try:
                for state in states:
                    self._news.put(state)
                    is_stopping = state.state == "stopping"
                if is_stopping:
                    raise Unavailable("the server stopped")
            except EagleRayError as error:
                self._news.put(error)
            time.sleep(RETRY_SECONDS)
            states = iter(self._stream)  # streams are ended from time to time

    def _take_news(self) -> bool:
        """Handle what the thread has read. Return whether there was anything."""
        num_news = 0
        while not self._news.empty():
            num_news += 1
            news = self._news.get()
            if isinstance(news, DashboardState):
                self._state, self._problem = _with_experts(news, self._state), ""
                self._rates.append(news.traffic.generation_tokens_per_second or 0.0)
            else:
                self._problem = f"trying again: {news}"
        return num_news > 0


def _with_experts(state: DashboardState, before: DashboardState) -> DashboardState:
    """Return the state with the experts of the one before, if they have not changed. Another instance may have none."""
    if state.experts is not None or state.instance != before.instance:
        return state
    return msgspec.structs.replace(state, experts=before.experts)
