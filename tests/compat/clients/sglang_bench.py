"""SGLang's benchmark of servers with its own backend and with those for OpenAI's routes.

Only the benchmark of the package is imported: the packages around it, which would import the whole engine and its
kernels, are replaced by empty ones.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

from checking import MODEL, MODEL_DIRECTORY, URL, check, expect, run_checks, run_command

NUM_PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 20, 32, 8
PROGRAM = """
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

root = Path(importlib.util.find_spec("sglang").origin).parent
for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
sys.modules["sglang.srt.disaggregation.utils"] = constants = ModuleType("constants")
constants.FAKE_BOOTSTRAP_HOST = ""  # for options that are not used here

from sglang.benchmark.serving import cli_main

cli_main()
"""
BACKENDS = ("vllm", "vllm-chat", "sglang-oai", "sglang-oai-chat", "sglang")


def bench(backend: str, *options: str) -> None:
    """Run a short benchmark. Raises `AssertionError` if a request failed or was cut short."""
    result = Path(f"{backend}.jsonl").absolute()
    run_command(
        *(sys.executable, "-c", PROGRAM, "--backend", backend, "--base-url", URL),
        *("--model", MODEL, "--tokenizer", MODEL_DIRECTORY, "--dataset-name", "random-ids"),
        *("--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
        *("--random-range-ratio", "1", "--num-prompts", str(NUM_PROMPTS), "--disable-tqdm"),
        *("--output-file", str(result), *options),
    )
    report = json.loads(result.read_text().splitlines()[-1])
    expect(report["completed"] == NUM_PROMPTS, "completed requests:", report["completed"])
    num_tokens = report["total_output_tokens"]
    expect(num_tokens == NUM_PROMPTS * OUTPUT_TOKENS, "tokens of all answers:", num_tokens)


for name in BACKENDS:
    check(f"backend {name}")(functools.partial(bench, name))
check("backend vllm without streams")(functools.partial(bench, "vllm", "--disable-stream"))
check("backend sglang, log-probabilities")(functools.partial(bench, "sglang", "--return-logprob"))

if __name__ == "__main__":
    run_checks()
