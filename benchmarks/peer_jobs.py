"""Runs one job of one engine and gives its figures."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peer_engines import Engine
from peer_rows import Job
from process_memory import PeakMemory

TIMEOUT = 1800
END_SECONDS = 60
NUM_PROMPTS = {1: 16, 8: 64, 32: 128}
"""By streams."""
NUM_INPUT, NUM_OUTPUT, VOCAB_SIZE = 128, 64, 7000


class JobFailed(Exception):
    """The engine could not do it; the message is what it said last."""


def run(job: Job, engine: Engine, checkpoint: Path, figures: Sequence[str], *, seed: int) -> dict[str, float]:
    """The figures that were asked for, by name. Raises `JobFailed`."""
    if job.is_http:
        return serve(engine, checkpoint, sorted({int(figure.partition("/")[0]) for figure in figures}), seed=seed)
    return measure(engine, checkpoint, job.options, figures)


def measure(engine: Engine, checkpoint: Path, options: dict[str, Any], figures: Sequence[str] = ()) -> dict[str, float]:
    """Through `measure_offline.py`, which has a usual choice of figures. Raises `JobFailed`."""
    script = Path(__file__).with_name("measure_offline.py")
    wanted = [figure for figure in figures if figure != "peak_anonymous_mib"]
    if figures and not wanted:
        wanted = ["batch32_s"]  # memory under some work
    command = [engine.python, str(script), engine.name, str(checkpoint), json.dumps(engine.options(options)), *wanted]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=engine.environment(options)
        )
        with _ended(process), PeakMemory(process.pid) as memory:
            try:
                output, _ = process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                raise JobFailed(f"not done after {TIMEOUT} s") from None
        if process.returncode != 0:
            raise JobFailed(_last_words(log, process.returncode))
    found: dict[str, float] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return found | {"peak_anonymous_mib": memory.peak_bytes / 2**20}


def serve(engine: Engine, checkpoint: Path, streams: Sequence[int], *, seed: int) -> dict[str, float]:
    """A server, and `eagleray bench serve` at each of `streams`. Raises `JobFailed`."""
    port = _free_port()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(engine.server(checkpoint, port), stdout=log, stderr=log, env=engine.environment({}))
        with _ended(process):
            _wait_until_healthy(process, port, log)
            figures: dict[str, float] = {}
            for count in streams:
                # Never the same prompts again: the prefix cache shall not help.
                found = _load(port, checkpoint, count, seed=1000 * seed + count)
                for name in ("ttft", "tpot"):
                    figures |= {f"{count}/{name}-{p}": found[f"{name}_ms"][p] for p in ("p50", "p99")}
                figures[f"{count}/tokens"] = found["output_tokens_per_s"]
    return figures


def _load(port: int, checkpoint: Path, streams: int, *, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "figures.json"
        load = {
            "base-url": f"http://127.0.0.1:{port}",
            "model": checkpoint,
            "num-prompts": NUM_PROMPTS[streams],
            "max-concurrency": streams,
            "random-input-len": NUM_INPUT,
            "random-output-len": NUM_OUTPUT,
            "vocab-size": VOCAB_SIZE,
            "num-warmups": 2 * streams,
            "seed": seed,
            "json": file,
        }
        flags = [part for name, value in load.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "eagleray.cli.main", "bench", "serve", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode != 0:
            raise JobFailed(done.stderr.strip().splitlines()[-1])
        figures: dict[str, Any] = json.loads(file.read_text())["figures"]
    if figures["failures"]:
        raise JobFailed(f"requests failed: {figures['failures']}")
    return figures


def _wait_until_healthy(process: subprocess.Popen[Any], port: int, log: Any) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise JobFailed(_last_words(log, process.returncode))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise JobFailed(f"the server is not healthy after {TIMEOUT} s")


@contextlib.contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Afterwards the process is over."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_SECONDS)


def _free_port() -> int:
    """Somebody else might take it before the server does: then the job fails and says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_words(log: Any, code: int) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return f"exit code {code}: {(errors or lines or ['it said nothing'])[-1][-300:]}"
