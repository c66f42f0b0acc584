"""An instance of eagleray in processes of its own, and the HTTP calls that a trainer makes."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from eagleray.weights import SharedMemorySender

START_SECONDS = 120.0
CALL_SECONDS = 120.0
POLL_SECONDS = 0.2
MAX_ATTEMPTS = 10
CONCURRENT_REQUESTS = 32


@dataclass(frozen=True)
class Rollout:
    """A completion of token ids, with the log-probability of each of its tokens."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[str]
    """Version of the weights that made each token."""
    experts: np.ndarray | None = None
    """Experts that computed each token of prompt and completion but the last: [tokens - 1, MoE layers, experts of a
    token], if the instance returns them."""


class Instance:
    """Starts `eagleray serve` with `options`, and stops it at the end of a `with` block."""

    def __init__(self, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "eagleray.cli.main", "serve", "--port", "0", "--log-level", "debug", *options]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._log = ""
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self._pool = ThreadPoolExecutor(CONCURRENT_REQUESTS)
        self._sender = SharedMemorySender()
        self._url = self._wait_for_log(r"serving .* at (http://\S+)/v1")

    def __enter__(self) -> Instance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._sender.close()
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def rollouts(
        self, prompts: Iterable[list[int]], *, num_each: int, max_tokens: int, seed: int
    ) -> list[list[Rollout]]:
        """Complete every prompt `num_each` times."""

        def complete(numbered: tuple[int, list[int]]) -> list[Rollout]:
            index, prompt = numbered
            params = {"n": num_each, "max_tokens": max_tokens, "logprobs": 0, "temperature": 1.0, "ignore_eos": True}
            body = {"token_ids": prompt, "sampling_params": params | {"seed": seed + index}}
            return [_rollout(prompt, choice) for choice in self._call("/inference/v1/generate", body)["choices"]]

        return list(self._pool.map(complete, enumerate(prompts)))

    def push(self, weights: Iterable[tuple[str, Tensor]], version: str, *, kill_engine: bool = False) -> int:
        """Replace the weights by way of shared memory, and return the number of attempts. An update that is broken off
        has changed nothing, so it is sent again from its start. `kill_engine` kills an engine in the middle of the
        first attempt."""
        weights = list(weights)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                self._call("/start_weight_update", {})
                for part in (weights[: len(weights) // 2], weights[len(weights) // 2 :]):
                    self._call("/update_weights", {"update_info": self._sender.write(part)})
                    if kill_engine and attempt == 1:
                        self._kill_engine()
                        kill_engine = False
                self._call("/finish_weight_update", {"weight_version": version, "require_complete": True})
            except urllib.error.HTTPError as error:
                print(f"  update {version}: {error.code}: {json.load(error)['error']['message']}")
                self._call("/abort_weight_update", {})
                self._wait_for_engine()
            else:
                return attempt
        raise RuntimeError(f"the weights of {version} could not be sent in {MAX_ATTEMPTS} attempts")

    def _wait_for_engine(self) -> None:
        """Wait until an engine can receive weights: it serves, or waits for weights that only the trainer has."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            engines = self._call("/weight_info")["engines"]
            if any(engine["state"] in ("ready", "waiting") for engine in engines):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"no engine can receive weights: {engines}")
            time.sleep(POLL_SECONDS)

    def _kill_engine(self) -> None:
        pid = int(re.findall(r"\bengine-0\S* is process (\d+)", self._log)[-1])
        print(f"  kill -9 {pid}: an engine, in the middle of an update")
        os.kill(pid, signal.SIGKILL)

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a POST, or a GET without a body, and return the answer. Raises `urllib.error.HTTPError`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as response:
            return json.load(response)

    def _wait_for_log(self, pattern: str) -> str:
        deadline = time.monotonic() + START_SECONDS
        while (match := re.search(pattern, self._log)) is None:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"the instance did not start:\n{self._log}")
            time.sleep(0.05)
        return match[1]

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log += line


def demo_model() -> Path:
    """Return the directory of the model that eagleray serves by default."""
    import eagleray

    return Path(eagleray.__file__).parent / "demo_model"


def _rollout(prompt: list[int], choice: dict[str, Any]) -> Rollout:
    experts = choice.get("routed_experts")
    return Rollout(
        prompt=prompt,
        token_ids=choice["token_ids"],
        logprobs=[position["logprob"] for position in choice["logprobs"]["content"]],
        versions=[span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])],
        experts=None if experts is None else np.load(io.BytesIO(base64.b64decode(experts))),
    )
