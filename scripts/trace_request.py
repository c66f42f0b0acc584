"""List the files of the package that one streamed completion enters, in the API server and in the engine.

    python scripts/trace_request.py [--chat] [--functions] [--limit 55]

Starts `serve --num-threads 1` with the embedded model and sends streamed requests of 12 tokens, one at a time, over one
connection. A file counts when one of its functions is called between the first byte of the request and the end of its
stream. Timers call functions too, in some of these windows or, if their period is short, in all: so a function counts
if it is called during every request, and during fewer than half of the idle pauses of the same length. A first request
is sent before, so that work of the first request alone does not count.

With --limit, exits with 1 if more files are entered.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
from chaos_server import Server

NUM_REQUESTS = 10
NUM_TOKENS = 12
PROCESSES = {"client-0": "API server", "engine-0": "engine"}
"""Names of the traced processes, by the labels that they are spawned with."""

SETTLE_SECONDS = 0.02
"""Time after the end of a stream in which the processes finish the request."""


class Function(NamedTuple):
    file: str
    name: str


Calls = dict[str, list[set[Function]]]
"""The functions that a process called, one set for each window; by the label of the process."""


@dataclass(frozen=True)
class Trace:
    requests: Calls
    idle: Calls
    """The calls during pauses that are as long as the requests."""

    def functions(self, label: str) -> set[Function]:
        """Return the functions that every request calls in this process, without those of timers."""
        counts = Counter(function for called in self.idle[label] for function in called)
        timers = {function for function, count in counts.items() if 2 * count >= len(self.idle[label])}
        return set.intersection(*self.requests[label]) - timers

    def files(self, label: str) -> set[str]:
        return {function.file for function in self.functions(label)}

    @property
    def all_files(self) -> set[str]:
        return set.union(*map(self.files, self.requests))


class Windows:
    """Says when processes record their calls, by a byte that they map; `directory` is EAGLERAY_TRACE."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = directory / "window"
        path.write_bytes(b"\0")
        with path.open("r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)
        self._count = 0

    @contextmanager
    def record(self) -> Iterator[int]:
        """Let the processes record their calls, and yield the window's number."""
        self._count += 1
        self._byte[0] = self._count
        yield self._count
        self._byte[0] = 0

    def calls(self, windows: list[int]) -> Calls:
        found: defaultdict[tuple[str, int], set[Function]] = defaultdict(set)
        for path in self._directory.glob("*.calls"):
            for line in path.read_text().splitlines():
                window, label, *function = line.split("\t")
                found[label, int(window)].add(Function(*function))
        return {label: [found[label, window] for window in windows] for label in PROCESSES}


def trace(root: Path, *, chat: bool) -> Trace:
    """Run a server in the directory `root` and trace its requests."""
    directory = root / "trace"
    directory.mkdir()
    windows = Windows(directory)
    paths = [str(Path(__file__).parent / "tracing"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"EAGLERAY_TRACE": str(directory), "PYTHONPATH": os.pathsep.join(paths)}
    server = Server(["--num-threads", "1"], root, log=root / "log", env=env)
    try:
        server.wait_until_serving()
        requests, idle = _record(server.url, windows, chat=chat)
        server.stop()
    finally:
        server.kill()
    return Trace(windows.calls(requests), windows.calls(idle))


def _record(url: str, windows: Windows, *, chat: bool) -> tuple[list[int], list[int]]:
    """Send the requests, with a pause as long after each; return the windows of the requests and of the pauses."""
    requests, idle = [], []
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as http:
        _stream(http, 0, chat=chat)
        for number in range(1, NUM_REQUESTS + 1):
            start = time.monotonic()
            with windows.record() as window:
                _stream(http, number, chat=chat)
                time.sleep(SETTLE_SECONDS)
            requests.append(window)
            seconds = time.monotonic() - start
            time.sleep(SETTLE_SECONDS)
            with windows.record() as window:
                time.sleep(seconds)
            idle.append(window)
    return requests, idle


def _stream(http: httpx.Client, number: int, *, chat: bool) -> None:
    """Send a request and read its stream to the end. The prompts share no prefix that the cache could serve."""
    text = f"{number} is the number of this story"
    body = {"model": "eagleray-demo", "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    if chat:
        path, body = "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    else:
        path, body = "/v1/completions", body | {"prompt": text}
    with http.stream("POST", path, json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200 and lines[-1] == "data: [DONE]", lines


def report(found: Trace, *, functions: bool) -> str:
    lines = []
    for label, name in PROCESSES.items():
        files = sorted(found.files(label))
        lines.append(f"{name}: {len(files)} files")
        for file in files:
            lines.append(f"  {file}")
            if functions:
                names = sorted(function.name for function in found.functions(label) if function.file == file)
                lines += [f"    {name}" for name in names]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--chat", action="store_true", help="trace a chat completion instead of a text completion")
    parser.add_argument("--functions", action="store_true", help="also list the functions that are called")
    parser.add_argument("--limit", type=int, help="fail if more files are entered")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="er-") as directory:
        found = trace(Path(directory), chat=args.chat)
    print(report(found, functions=args.functions))
    total = len(found.all_files)
    print(f"{total} files in both processes together" + (f"; the limit is {args.limit}" if args.limit else ""))
    return int(args.limit is not None and total > args.limit)


if __name__ == "__main__":
    sys.exit(main())
