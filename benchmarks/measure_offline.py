"""Program that measures one engine with one checkpoint. Run by `peers.py` in the engine's Python.

python benchmarks/measure_offline.py eagleray|vllm|llama.cpp CHECKPOINT [JSON with more options of LLM]

It prints a line of JSON with `ready_s` when the engine is ready, then one for each name of a figure that it reads from
standard input. In between the engine is idle, so that others can be measured in turn.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

PROMPT_TOKENS = 1024
FIRST_PROMPTS = 4
DECODE_TOKENS = 128
LONG_PROMPT_TOKENS = 8192
LONG_DECODE_TOKENS = 64
ROW_SECONDS = 3.0
WARM_SECONDS = 15.0
OPTIONS: dict[str, dict[str, Any]] = {
    "eagleray": {"max_model_len": 2048, "log_level": "warning"},
    "vllm": {"max_model_len": 2048, "disable_log_stats": True},
}


class PackageEngine:
    """The class `LLM` of eagleray or vLLM."""

    def __init__(self, engine: str, checkpoint: str, options: dict[str, Any]) -> None:
        self._package = import_module(engine)
        self._llm = self._package.LLM(checkpoint, **(OPTIONS[engine] | options))

    def generate(self, prompts: list[list[int]], num_out: int) -> list[int]:
        """Generate greedily and return the number of tokens that each of `prompts` got."""
        params = self._package.SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        if hasattr(self._llm, "close"):
            self._llm.close()


class OfflineBench:
    """Measures the times of an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._rng = random.Random(0)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Make prompts that never repeat, so that the prefix cache has no hits."""
        return [[self._rng.randrange(10, 7000) for _ in range(length)] for _ in range(count)]

    def once(self, prompts: list[list[int]], num_out: int) -> float:
        start = time.perf_counter()
        lengths = self._engine.generate(prompts, num_out)
        seconds = time.perf_counter() - start
        assert lengths == [num_out] * len(prompts), lengths
        return seconds

    def seconds(self, count: int, num_in: int, num_out: int) -> float:
        """Return the median of the runs that fit into `ROW_SECONDS`, at least one."""
        runs: list[float] = []
        while sum(runs) < ROW_SECONDS:
            runs.append(self.once(self.prompts(count, num_in), num_out))
        return statistics.median(runs)

    def warm_up(self) -> None:
        """Start threads, allocate, compile, and touch the cache's memory, which the system hands out page by page.

        vLLM has done the latter when it is ready.
        """
        self.seconds(2, 32, 8)
        deadline = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < deadline:
            self.once(self.prompts(1, PROMPT_TOKENS), 1)

    def first_prompts_tokens_per_s(self) -> float:
        """Measure prompts one after another. They are the first ones only if nothing was measured before."""
        seconds = sum(self.once(self.prompts(1, PROMPT_TOKENS), 1) for _ in range(FIRST_PROMPTS))
        return FIRST_PROMPTS * PROMPT_TOKENS / seconds

    def token_ms(self) -> float:
        return 1000 * (self.seconds(1, 32, 1 + DECODE_TOKENS) - self.seconds(1, 32, 1)) / DECODE_TOKENS

    def long_token_ms(self) -> float:
        """Measure with the same prompt every time, so that only its last token is computed after the first time."""
        prompt = self.prompts(1, LONG_PROMPT_TOKENS)
        self.once(prompt, 1)
        first = statistics.median(self.once(prompt, 1) for _ in range(3))
        whole = statistics.median(self.once(prompt, 1 + LONG_DECODE_TOKENS) for _ in range(3))
        return 1000 * (whole - first) / LONG_DECODE_TOKENS


OF_A_NEW_ENGINE = "first_prompts_tokens_per_s"
"""Name of the figure that is measured without a warm-up."""
FIGURES: dict[str, Callable[[OfflineBench], float]] = {
    OF_A_NEW_ENGINE: OfflineBench.first_prompts_tokens_per_s,
    "token_ms": OfflineBench.token_ms,
    "prompt_tokens_per_s": lambda bench: PROMPT_TOKENS / bench.seconds(1, PROMPT_TOKENS, 1),
    "batch16_s": lambda bench: bench.seconds(16, 32, 64),
    "batch32_s": lambda bench: bench.seconds(32, 128, 64),
    "long_prompt_tokens_per_s": lambda bench: LONG_PROMPT_TOKENS / bench.seconds(1, LONG_PROMPT_TOKENS, 1),
    "long_token_ms": OfflineBench.long_token_ms,
}


def main(engine: str, checkpoint: str, options: str = "{}") -> None:
    began = time.perf_counter()
    if engine == "llama.cpp":
        from measure_llama import LlamaEngine  # only its own Python has the library

        opened: Any = LlamaEngine(checkpoint, json.loads(options))
    else:
        opened = PackageEngine(engine, checkpoint, json.loads(options))
    print(json.dumps({"ready_s": time.perf_counter() - began}), flush=True)
    bench = OfflineBench(opened)
    is_warm = False
    for line in sys.stdin:
        name = line.strip()
        if not is_warm and name != OF_A_NEW_ENGINE:
            bench.warm_up()
            is_warm = True
        print(json.dumps({name: FIGURES[name](bench)}), flush=True)
    opened.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
