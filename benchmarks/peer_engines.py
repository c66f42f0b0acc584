"""The engines that are compared: their Python, environment, options and servers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf_file import convert, quantize_by_llama
from peer_rows import PeerJob
from shapes import make

BOTH_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}
A_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
CACHE_GIB = 1
"""Size of the KV cache of engines with such an option: so small that the warm-up touches all of it."""
VLLM = {"VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB), "HF_HUB_OFFLINE": "1"}
MAX_MODEL_LEN = 2048


OWN_BF16 = "bf16"
LLAMA_FORMATS = {"int8": "Q8_0", "int4": "Q4_K_M"}

LIMIT = "limit"
"""Name of the pseudo-engine that gives the machine's limit, see `measure_limit.py`."""


@dataclass(frozen=True)
class PeerEngine:
    """Engine by its name: `eagleray`, `bf16` (eagleray without the quantization of a row), `vllm`, `llama.cpp` or
    `limit`."""

    name: str
    python: str = sys.executable
    preload: Sequence[str] = field(default=())
    """Libraries to preload, as the engine's documentation recommends."""

    def can(self, job: PeerJob) -> bool:
        """Whether the engine can do `job`: llama.cpp and the limit have neither a server nor several workers."""
        if self.name in (OWN_BF16, "vllm") and bool(job.quantization) is not (self.name == OWN_BF16):
            return False
        return self.name not in ("llama.cpp", LIMIT) or not (job.is_http or job.parallel)

    @property
    def package(self) -> str:
        """The engine's name for `measure_offline.py`."""
        return "eagleray" if self.name == OWN_BF16 else self.name

    def checkpoint(self, job: PeerJob, directory: Path) -> Path:
        """Return the checkpoint in the engine's format, which is made now unless it exists."""
        path = make(job.model, directory)
        if self.name != "llama.cpp":
            return path
        file = directory / f"{job.model}.gguf"
        if not file.exists():
            convert(path, file)
        if not job.quantization:
            return file
        quantized = directory / f"{job.model}-{LLAMA_FORMATS[job.quantization]}.gguf"
        if not quantized.exists():
            quantize_by_llama(self.python, file, quantized, LLAMA_FORMATS[job.quantization])
        return quantized

    def environment(self, options: dict[str, Any]) -> dict[str, str]:
        """Return the environment of a process that runs with these options of `LLM`."""
        environment = dict(os.environ)
        if self.name == "vllm":
            num_workers = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
            environment |= VLLM | (BOTH_CORES if num_workers == 1 else A_CORE_EACH)
        if self.preload:
            environment["LD_PRELOAD"] = ":".join(self.preload)
        return environment

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of `LLM` in the engine's own terms."""
        several = options.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}
        if self.package == "eagleray":
            kept = {key: value for key, value in options.items() if self.name != OWN_BF16 or key != "quantization"}
            return kept | {"kv_cache_memory": f"{CACHE_GIB}GiB"}
        return options | ({"distributed_executor_backend": "mp"} if several and self.name == "vllm" else {})

    def server(self, checkpoint: Path, port: int) -> list[str]:
        """Return the command that serves `checkpoint` with its path as the model's name."""
        common = ["--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)]
        if self.name == "vllm":
            entry = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--disable-log-stats"]
            return [self.python, *entry, *common]
        return [self.python, "-m", "eagleray.cli.main", "serve", str(checkpoint), "--log-level", "warning", *common]
