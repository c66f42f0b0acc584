"""guidellm with the routes for texts, chats and responses: streams and whole answers, at a rate, and in two turns."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from checking import MODEL, MODEL_DIRECTORY, URL, check, expect, run_checks, run_module

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 10, 32, 8
DATA = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"


def bench(route: str, *, profile: str = "kind=concurrent,streams=4", backend: str = "", data: str = "") -> None:
    """Run a short benchmark. Raises `AssertionError` if a request failed or was cut short."""
    run_module(
        *("guidellm", "run", "--disable-console-interactive", "--output", f"kind=json,path={Path.cwd()}"),
        *("--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={route}{backend}"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL_DIRECTORY}", "--data", f"{DATA}{data}"),
        *("--profile", profile, "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
    )
    result = json.loads(Path("benchmarks.json").read_text())["benchmarks"][0]
    totals = result["metrics"]["request_totals"]
    # at a rate, guidellm may end before it has counted the last request
    expect(totals["successful"] == totals["total"] >= NUM_REQUESTS - 1, "requests by outcome:", totals)
    num_tokens = [request["output_metrics"]["total_tokens"] for request in result["requests"]["successful"]]
    expect(num_tokens == [OUTPUT_TOKENS] * totals["total"], "tokens of each answer:", num_tokens)


for name in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
    check(name)(functools.partial(bench, name))
check("/v1/chat/completions without streams")(functools.partial(bench, "/v1/chat/completions", backend=",stream=false"))
check("/v1/chat/completions at a rate")(
    functools.partial(bench, "/v1/chat/completions", profile="kind=constant,rate=20")
)
check("/v1/chat/completions, two turns")(functools.partial(bench, "/v1/chat/completions", data=",turns=2"))

if __name__ == "__main__":
    os.environ["HF_HOME"] = str(Path("huggingface").absolute())
    run_checks()
