"""Runs of one engine at one job: opened once, measured repeatedly, in turn with the other engines."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure_limit import Limit
from peer_engines import LIMIT, PeerEngine
from peer_rows import PeerJob
from process_memory import PeakMemory

from eagleray.errors import EagleRayError
from eagleray_bench.http_client import request_once

TIMEOUT = 1800
STOP_TIMEOUT_SECONDS = 60
NUM_PROMPTS = {1: 32, 8: 64, 32: 128}
"""Number of prompts, by the number of streams."""
NUM_INPUT, NUM_OUTPUT, VOCAB_SIZE = 128, 64, 7000


class JobFailed(Exception):
    """Raised if the engine failed; the message has its last line."""


def open_job(job: PeerJob, engine: PeerEngine, checkpoint: Path) -> Offline | Served | Limit:
    """Start the engine and return it ready to be measured; the caller closes it. Raises `JobFailed`."""
    if engine.name == LIMIT:
        return Limit(checkpoint, job.quantization)
    return Served(engine, checkpoint) if job.is_http else Offline(engine, checkpoint, job.options)


class Offline:
    """A process that runs `measure_offline.py`, idle except while a figure is measured."""

    def __init__(self, engine: PeerEngine, checkpoint: Path, options: dict[str, Any]) -> None:
        script = Path(__file__).with_name("measure_offline.py")
        command = [engine.python, str(script), engine.package, str(checkpoint), json.dumps(engine.options(options))]
        self._arguments = (engine, checkpoint, options)
        with contextlib.ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile("w+"))
            self._process = stack.enter_context(
                _stopping(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=self._log,
                        text=True,
                        env=engine.environment(options),
                    )
                )
            )
            self._memory = stack.enter_context(PeakMemory(self._process.pid))
            self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
            threading.Thread(target=self._read_lines, daemon=True).start()
            self.ready_s = self._receive()["ready_s"]
            self._exit_stack = stack.pop_all()

    def measure(self, figures: Sequence[str], turn: int) -> dict[str, float]:
        """Measure these figures and return them by name. Raises `JobFailed`."""
        return {figure: self._measure(figure, turn) for figure in figures}

    def close(self) -> None:
        self._exit_stack.close()

    def _measure(self, figure: str, turn: int) -> float:
        match figure:
            case "ready_s" if turn == 0:
                return self.ready_s
            case "ready_s":
                with contextlib.closing(Offline(*self._arguments)) as another:
                    return another.ready_s
            case "first_prompts_tokens_per_s":
                with contextlib.closing(Offline(*self._arguments)) as another:
                    return another._ask(figure)
            case "peak_anonymous_mib":
                if turn == 0:
                    self._measure("batch32_s", turn)  # memory is measured under load
                return self._memory.peak_bytes / 2**20
            case _:
                return self._ask(figure)

    def _ask(self, figure: str) -> float:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has exited, so the answer is its end
            print(figure, file=self._process.stdin, flush=True)
        return self._receive()[figure]

    def _receive(self) -> dict[str, float]:
        try:
            line = self._answers.get(timeout=TIMEOUT)
        except queue.Empty:
            raise JobFailed(f"no answer after {TIMEOUT} s") from None
        if line is None:
            raise JobFailed(_exit_message(self._log, self._process.wait(STOP_TIMEOUT_SECONDS)))
        found: dict[str, float] = json.loads(line)
        return found

    def _read_lines(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(line)
        self._answers.put(None)


class Served:
    """A server, measured by `eagleray bench serve`."""

    def __init__(self, engine: PeerEngine, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._port = _free_port()
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            command = engine.server(checkpoint, self._port)
            process = stack.enter_context(
                _stopping(subprocess.Popen(command, stdout=log, stderr=log, env=engine.environment({})))
            )
            _wait_until_healthy(process, self._port, log)
            self._exit_stack = stack.pop_all()

    def measure(self, figures: Sequence[str], turn: int) -> dict[str, float]:
        """Measure these figures (`STREAMS/FIGURE`) and return them by name. Raises `JobFailed`."""
        found: dict[str, float] = {}
        for streams in sorted({int(figure.partition("/")[0]) for figure in figures}):
            # prompts never repeat, so that the prefix cache has no hits
            load = _load(self._port, self._checkpoint, streams, seed=1000 * (turn + 1) + streams)
            for name in ("ttft", "tpot"):
                found |= {f"{streams}/{name}-{p}": load[f"{name}_ms"][p] for p in ("p50", "p99")}
            found[f"{streams}/tokens"] = load["output_tokens_per_s"]
        return {figure: found[figure] for figure in figures}

    def close(self) -> None:
        self._exit_stack.close()


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
            raise JobFailed(_exit_message(log, process.returncode))
        with contextlib.suppress(EagleRayError):
            if request_once(f"http://127.0.0.1:{port}/health", timeout=10).status == 200:
                return
        time.sleep(0.2)
    raise JobFailed(f"the server is not healthy after {TIMEOUT} s")


@contextlib.contextmanager
def _stopping(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Stop the process when the context ends."""
    try:
        yield process
    finally:
        if process.stdin:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # asks it to exit
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_SECONDS)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_SECONDS)


def _free_port() -> int:
    """Return a free port. If another process takes it before the server does, the job fails with that cause."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _exit_message(log: Any, code: int) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return f"exit code {code}: {(errors or lines or ['it printed nothing'])[-1][-300:]}"
