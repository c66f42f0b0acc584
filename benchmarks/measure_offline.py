"""One engine, one checkpoint, one process: prints the figures of `offline.py` as a line of JSON.

python benchmarks/measure_offline.py eagleray|vllm CHECKPOINT [JSON object with more options of LLM]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from importlib import import_module
from typing import Any

PROMPT_TOKENS = 1024
DECODE_TOKENS = 128
ROW_SECONDS = 3.0
OPTIONS: dict[str, dict[str, Any]] = {
    "eagleray": {"max_model_len": 2048, "log_level": "warning"},
    "vllm": {"max_model_len": 2048, "disable_log_stats": True},
}


def main(engine: str, checkpoint: str, options: str = "{}") -> None:
    began = time.perf_counter()
    package = import_module(engine)
    llm = package.LLM(checkpoint, **OPTIONS[engine], **json.loads(options))
    figures = {"ready_s": time.perf_counter() - began}
    rng = random.Random(0)

    def seconds(num_requests: int, num_in: int, num_out: int) -> float:
        """Median of the runs that fit into `ROW_SECONDS`, at least one. Never the same prompt twice: the prefix cache
        shall not help."""
        runs = [once(num_requests, num_in, num_out)]
        while sum(runs) < ROW_SECONDS:
            runs.append(once(num_requests, num_in, num_out))
        return statistics.median(runs)

    def once(num_requests: int, num_in: int, num_out: int) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(10, 7000) for _ in range(num_in)]} for _ in range(num_requests)]
        params = package.SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_out for output in outputs)
        return time.perf_counter() - start

    seconds(2, 32, 8)  # threads, allocations and lazy compilation
    seconds(1, PROMPT_TOKENS, 1)
    figures["token_ms"] = 1000 * (seconds(1, 32, 1 + DECODE_TOKENS) - seconds(1, 32, 1)) / DECODE_TOKENS
    figures["prompt_tokens_per_s"] = PROMPT_TOKENS / seconds(1, PROMPT_TOKENS, 1)
    figures["batch16_s"] = seconds(16, 32, 64)
    figures["batch32_s"] = seconds(32, 128, 64)
    print(json.dumps(figures))
    if engine == "eagleray":
        llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
