"""Cost of an open live page, and the delay with which it shows the kill of an engine.

    python benchmarks/dashboard.py --seconds 30 --rounds 5 --kills 10 --browser
    python benchmarks/dashboard.py MODEL --engines 4 --api-servers 2 --json out.json

Starts `eagleray serve`. The cost is the processor time of all its processes with one page open, less the time without
one, for equal spans in turn. The delay begins when the signal is sent, and ends when the state that shows the exit has
arrived; with `--browser`, when an element of the page in a headless Chromium shows it. The server is idle meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

START_SECONDS = 300.0
IDLE_SECONDS = 120.0
IDLE_SHARE = 0.05
RECOVERY_SECONDS = 120.0
REOPEN_SECONDS = 0.5
SETTLE_SECONDS = 2.0
"""Time after a page was opened or closed that is not measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint (default: the embedded one)")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--api-servers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a span (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="spans with and without a page (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="engines to kill (default: %(default)s)")
    parser.add_argument("--browser", action="store_true", help="measure delays in a page (needs eagleray[browser])")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with started_server(options) as (pid, url):
        costs = list(measure_costs(pid, url, seconds=options.seconds, rounds=options.rounds))
        print(f"cost of an open page: {statistics.median(costs):.2f} % of a core", *(f"{cost:.2f}" for cost in costs))
        measure_delays = delays_in_browser if options.browser else delays_in_stream
        delays = list(measure_delays(url, kills=options.kills, engines=options.engines))
        print(f"delay of a kill: median {statistics.median(delays):.3f} s, longest {max(delays):.3f} s")
    if options.json is not None:
        options.json.write_text(json.dumps({"cost_percent": costs, "delay_seconds": delays}))


@contextlib.contextmanager
def started_server(options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Start the server; yield its process id and URL."""
    command = [sys.executable, "-m", "eagleray.cli.main", "serve", *([options.model] if options.model else [])]
    command += ["--port", "0", "--data-parallel-size", str(options.engines)]
    command += ["--api-server-count", str(options.api_servers)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    deadline = threading.Timer(START_SECONDS, process.kill)
    deadline.start()
    try:
        found = next(filter(None, (re.search(r"serving .* at (http://\S+)/v1", line) for line in process.stderr)), None)
        assert found is not None, f"the server did not start within {START_SECONDS:.0f} s"
        deadline.cancel()
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process.pid, found[1]
    finally:
        deadline.cancel()
        process.terminate()
        process.wait()


def measure_costs(root: int, url: str, *, seconds: float, rounds: int) -> Iterator[float]:
    """Yield, for each round, the cost of an open page in percent of a core."""
    wait_until_idle(root)
    for _ in range(rounds):
        idle = processor_share(root, lambda: time.sleep(seconds))
        with contextlib.closing(read_states(url)) as states:
            read_for(states, SETTLE_SECONDS)
            watched = processor_share(root, lambda: read_for(states, seconds))
        time.sleep(SETTLE_SECONDS)
        yield 100 * (watched - idle)


def wait_until_idle(root: int) -> None:
    """Wait until engines have done what they do in the background after their start."""
    deadline = time.monotonic() + IDLE_SECONDS
    while processor_share(root, lambda: time.sleep(SETTLE_SECONDS)) > IDLE_SHARE:
        assert time.monotonic() < deadline, f"the server is not idle after {IDLE_SECONDS:.0f} s"


def processor_share(root: int, wait: Callable[[], None]) -> float:
    """Return the processor time that the server takes in a second, while this program waits."""
    before, began = processor_seconds(root), time.monotonic()
    wait()
    return (processor_seconds(root) - before) / (time.monotonic() - began)


def processor_seconds(root: int) -> float:
    """Return the processor time of a process and its descendants so far."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    threads = (path for pid in family for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def read_states(url: str) -> Generator[Any, None, None]:
    """Yield states as a page reads them, which opens a stream again when the server has ended it."""
    request = Request(f"{url}/dashboard/state", headers={"Accept": "text/event-stream"})
    while True:
        with urlopen(request, timeout=RECOVERY_SECONDS) as answer:
            yield from (json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: {"))
        time.sleep(REOPEN_SECONDS)


def read_for(states: Iterator[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for _ in states:
        if time.monotonic() >= deadline:
            return


def delays_in_stream(url: str, *, kills: int, engines: int) -> Iterator[float]:
    """Yield the seconds from each kill to the state that shows it."""
    with contextlib.closing(read_states(url)) as states:
        for kill in range(kills):
            rank = kill % engines
            victim = next(state for state in states if all(is_serving(engine) for engine in state["engines"]))
            began = time.monotonic()
            os.kill(victim["engines"][rank]["pid"], signal.SIGKILL)
            next(state for state in states if not is_serving(state["engines"][rank]))
            yield time.monotonic() - began


def is_serving(engine: Any) -> bool:
    return bool(engine["state"] == "serving")


def delays_in_browser(url: str, *, kills: int, engines: int) -> Iterator[float]:
    """Yield the seconds from each kill to the element of a page that shows it."""
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{url}/dashboard")
        for kill in range(kills):
            rank = kill % engines
            serving = page.locator("#engines > .serving")
            expect(serving).to_have_count(engines, timeout=1000 * RECOVERY_SECONDS)
            with urlopen(f"{url}/dashboard/state") as answer:
                pid = json.load(answer)["engines"][rank]["pid"]
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            page.wait_for_selector(f"#engines > [data-key='{rank}'].restarting")
            yield time.monotonic() - began
        browser.close()


if __name__ == "__main__":
    main()
