"""Time to the first token through Ray Serve's proxy, and through `eagleray serve` beside it, in turn.

python benchmarks/ray_serve.py [--model CHECKPOINT] [--requests 200] [--tokens 16] [--haproxy] [--json FILE]

Starts a Ray cluster of its own with an application of `eagleray.serve`, and `eagleray serve` on the same machine, both
with one engine that computes with one thread. One client sends streaming requests over two connections that stay open,
to one server and then the other, each time in a new order. Prints the median, the 90th and the 99th percentile of the
time from sending a request to its first token, and of the time per further token, and the difference of the medians.
Exits with 1 if the first token comes later than `--limit` ms more through Ray Serve. `--haproxy`: Serve's HAProxy sends
requests directly to replicas.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OBJECT_STORE_BYTES = 80_000_000
READY_SECONDS = 120.0
POLL_SECONDS = 0.1
PROMPT_TOKENS = 16


@dataclass
class Measured:
    """Times of one server, in ms."""

    name: str
    connection: http.client.HTTPConnection
    first_token: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)


def main() -> None:
    options = _parser().parse_args()
    words = {"num_threads": 1, "device": "cpu", "num_kv_blocks": 512, "max_num_seqs": 16}
    with contextlib.ExitStack() as stack:
        beside = stack.enter_context(eagleray_serve(options.model, words))
        through = stack.enter_context(ray_serve(options.model, words, has_haproxy=options.haproxy))
        servers = [connected("eagleray serve", beside), connected("Ray Serve", through)]
        for server in servers:
            for _ in range(options.warm_up):
                ask(server, options.tokens)
            server.first_token.clear()
            server.per_token.clear()
        order = random.Random(0)
        for _ in range(options.requests):
            for server in order.sample(servers, len(servers)):
                ask(server, options.tokens)
    later = statistics.median(servers[1].first_token) - statistics.median(servers[0].first_token)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {options.requests} requests to each, in turn")
    print("| server | first token, ms: p50 | p90 | p99 | further token, ms: p50 | p90 | p99 |")
    print("|---|---|---|---|---|---|---|")
    for server in servers:
        cells = [f"{value:.2f}" for times in (server.first_token, server.per_token) for value in percentiles(times)]
        print(f"| {server.name} | {' | '.join(cells)} |")
    print(f"first token through Ray Serve: {later:+.2f} ms (p50)")
    if options.json is not None:
        with open(options.json, "w") as file:
            json.dump({server.name: [server.first_token, server.per_token] for server in servers}, file)
    sys.exit(later > options.limit)


def ask(server: Measured, num_tokens: int) -> None:
    """Send a request with a new prompt, so that nothing of it is cached, and record the times of its stream."""
    prompt = [random.randrange(1, 250) for _ in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    began = time.perf_counter()
    server.connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = server.connection.getresponse()
    if response.status != 200:
        sys.exit(f"{server.name}: {response.status} {response.read().decode()}")
    first = None
    for line in response:
        if first is None and line.startswith(b"data: "):
            first = time.perf_counter()
    ended = time.perf_counter()
    assert first is not None
    server.first_token.append(1000 * (first - began))
    server.per_token.append(1000 * (ended - first) / max(1, num_tokens - 1))


def connected(name: str, url: str) -> Measured:
    """Return a server with a connection to it. Its small writes are sent at once."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=READY_SECONDS)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Measured(name, connection)


@contextlib.contextmanager
def eagleray_serve(model: str | None, words: dict[str, Any]) -> Iterator[str]:
    """Run `eagleray serve` and yield its URL."""
    port = free_port()
    flags = [part for name, value in words.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "eagleray", "serve", *([model] if model else []), "--port", str(port), *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def ray_serve(model: str | None, words: dict[str, Any], *, has_haproxy: bool) -> Iterator[str]:
    """Run an application on a Ray cluster of its own and yield its URL."""
    if has_haproxy:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray  # here, because Ray reads the variables when it is imported
    from ray import serve

    from eagleray.serve import build_app

    directory, port = tempfile.mkdtemp(prefix="er-"), free_port()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        _temp_dir=directory,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(model, **words))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return
        time.sleep(POLL_SECONDS)
    sys.exit(f"{url} is not ready")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def percentiles(times: list[float]) -> list[float]:
    """Return the median, the 90th and the 99th percentile."""
    in_order = sorted(times)
    return [in_order[min(len(in_order) - 1, int(len(in_order) * part))] for part in (0.5, 0.9, 0.99)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint (default: the embedded demo model)")
    parser.add_argument("--requests", type=int, default=200, help="requests to each server")
    parser.add_argument("--warm-up", type=int, default=20, help="requests to each server before")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--limit", type=float, default=10.0, help="ms by which the first token may come later")
    parser.add_argument("--haproxy", action="store_true", help="use Serve's HAProxy, which reaches replicas directly")
    parser.add_argument("--json", metavar="FILE", help="write all times there")
    return parser


if __name__ == "__main__":
    main()
