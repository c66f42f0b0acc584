"""The engines that are compared: in which Python they run, with what around them, and how their servers start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf_file import convert
from peer_rows import Job
from shapes import make

BOTH_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}
A_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
CACHE_GIB = 1
"""For all that can be told. Small, so that all of its memory has been used once when the warm-up is over."""
VLLM = {"VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB), "HF_HUB_OFFLINE": "1"}
MAX_MODEL_LEN = 2048


LIMIT = "limit"
"""Takes part as an engine: what the machine would allow, see `measure_limit.py`."""


@dataclass(frozen=True)
class Engine:
    """One of `eagleray`, `vllm`, `llama.cpp`, or `limit`."""

    name: str
    python: str = sys.executable
    preload: Sequence[str] = field(default=())
    """Libraries that its documentation preloads."""

    def can(self, job: Job) -> bool:
        """llama.cpp is measured as a library with one worker, and so is the limit."""
        return self.name not in ("llama.cpp", LIMIT) or not (job.is_http or job.parallel)

    def checkpoint(self, model: str, directory: Path) -> Path:
        """Made now unless it is there already."""
        path = make(model, directory)
        if self.name != "llama.cpp":
            return path
        file = directory / f"{model}.gguf"
        if not file.exists():
            convert(path, file)
        return file

    def environment(self, options: dict[str, Any]) -> dict[str, str]:
        """For a process that runs with these options of `LLM`."""
        environment = dict(os.environ)
        if self.name == "vllm":
            num_workers = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
            environment |= VLLM | (BOTH_CORES if num_workers == 1 else A_CORE_EACH)
        if self.preload:
            environment["LD_PRELOAD"] = ":".join(self.preload)
        return environment

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The same as this engine wants them."""
        several = options.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}
        if self.name == "eagleray":
            return options | {"kv_cache_memory": f"{CACHE_GIB}GiB"}
        return options | ({"distributed_executor_backend": "mp"} if several and self.name == "vllm" else {})

    def server(self, checkpoint: Path, port: int) -> list[str]:
        """The command that serves `checkpoint`, under its own path as the model's name."""
        common = ["--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)]
        if self.name == "vllm":
            entry = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--disable-log-stats"]
            return [self.python, *entry, *common]
        return [self.python, "-m", "eagleray.cli.main", "serve", str(checkpoint), "--log-level", "warning", *common]
