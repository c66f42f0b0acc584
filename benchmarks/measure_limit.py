"""Lower limit of the time that a row takes, if only reading memory and multiplying cost time. Used by `peer_jobs.py`.

Both rates are measured (`limits.cpp`) whenever a figure is requested, so that it belongs to the same minute as the
engines' figures. A step takes the longer of the two: reading the weights and the cache once, or the products of its
tokens. Products with weights of 4 bits are counted as half, because processors multiply bytes twice as fast as
bfloat16.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEGABYTES = 1024
ITEM = 2
"""Bytes per bfloat16."""
OF_INT8, OF_INT8_HEAD = 1 + 4 / 256, 1 + 4 / 64
"""Bytes per weight, with the scale and the offset of a group."""
OF_INT4 = 1 / 2 + 1 / 32 + 2 / 256
"""Bytes per weight, with the multiple of a group and the scale of a block."""


@dataclass(frozen=True)
class MachineLimits:
    bytes_per_s: float
    operations_per_s: float


class ModelSizes:
    """Sizes of a checkpoint's matrices, in elements, and the bytes of each. `quantization`: `int8`, `int4`, or ""."""

    def __init__(self, checkpoint: Path, quantization: str = "") -> None:
        config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        self.num_layers: int = config["num_hidden_layers"]
        self.query_size: int = config["num_attention_heads"] * head_dim
        self.cache_size: int = 2 * config["num_key_value_heads"] * head_dim
        self.attention: int = hidden * (2 * self.query_size + self.cache_size)
        self.head: int = hidden * config["vocab_size"]
        self.num_experts: int = config.get("num_experts") or config.get("num_local_experts", 1)
        self.experts_per_token: int = config.get("num_experts_per_tok", 1)
        inner = config["moe_intermediate_size"] if self.num_experts > 1 else config["intermediate_size"]
        self.expert: int = 3 * hidden * inner
        small = {"int8": OF_INT8, "int4": OF_INT4}.get(quantization, ITEM)
        self.head_item = OF_INT8_HEAD if quantization else ITEM
        self.expert_item = small
        self.product = 0.5 if quantization == "int4" else 1.0
        self.attention_item = OF_INT8 if quantization and self.num_experts > 1 else small

    def step_seconds(self, machine: MachineLimits, *, rows: int, tokens: int, context: int) -> float:
        """Return the seconds of a step in which each row computes `tokens` tokens after `context`, and samples one."""
        experts = min(self.num_experts, rows * tokens * self.experts_per_token)
        of_layer = self.attention * self.attention_item + experts * self.expert * self.expert_item
        weights = self.num_layers * of_layer + self.head * self.head_item
        cache = self.num_layers * rows * context * self.cache_size
        seen = tokens * context + tokens * (tokens + 1) // 2
        of_token = self.num_layers * (self.attention + self.experts_per_token * self.expert)
        products = self.product * rows * tokens * of_token
        products += rows * self.head + self.num_layers * rows * seen * 2 * self.query_size
        return max((weights + ITEM * cache) / machine.bytes_per_s, 2 * products / machine.operations_per_s)

    def seconds(self, machine: MachineLimits, *, rows: int, num_in: int, num_out: int) -> float:
        """Return the seconds of all prompts in one step and the rest token by token."""
        steps = (
            self.step_seconds(machine, rows=rows, tokens=1, context=num_in + index) for index in range(num_out - 1)
        )
        return self.step_seconds(machine, rows=rows, tokens=num_in, context=0) + sum(steps)


def prompt_tokens_per_s(model: ModelSizes, machine: MachineLimits) -> float:
    """Return the limit of a prompt, to which a new engine is held as well."""
    return 1024 / model.seconds(machine, rows=1, num_in=1024, num_out=1)


FIGURES: dict[str, Callable[[ModelSizes, MachineLimits], float]] = {
    "token_ms": lambda model, machine: 1000 * model.step_seconds(machine, rows=1, tokens=1, context=96),
    "prompt_tokens_per_s": prompt_tokens_per_s,
    "first_prompts_tokens_per_s": prompt_tokens_per_s,
    "batch16_s": lambda model, machine: model.seconds(machine, rows=16, num_in=32, num_out=64),
    "batch32_s": lambda model, machine: model.seconds(machine, rows=32, num_in=128, num_out=64),
    "long_prompt_tokens_per_s": lambda model, machine: 8192 / model.seconds(machine, rows=1, num_in=8192, num_out=1),
    "long_token_ms": lambda model, machine: 1000 * model.step_seconds(machine, rows=1, tokens=1, context=8224),
}


class Limit:
    """Pseudo-engine that measures the machine and computes the time that a model needs on it at least."""

    def __init__(self, checkpoint: Path, quantization: str = "") -> None:
        self._model = ModelSizes(checkpoint, quantization)
        self._directory = tempfile.TemporaryDirectory()
        self._program = Path(self._directory.name) / "limits"
        compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
        source = Path(__file__).with_name("limits.cpp")
        command = [compiler, "-O3", "-march=native", "-fopenmp", str(source), "-o", str(self._program)]
        subprocess.run(command, check=True)

    def measure(self, figures: list[str], turn: int) -> dict[str, float]:
        """Return the limits of those of `figures` that have one."""
        threads = len(os.sched_getaffinity(0))
        output = subprocess.run(
            [str(self._program), str(MEGABYTES), str(threads)], check=True, capture_output=True, text=True
        ).stdout
        machine = MachineLimits(*map(float, output.split()))
        return {name: FIGURES[name](self._model, machine) for name in figures if name in FIGURES}

    def close(self) -> None:
        self._directory.cleanup()
