"""schemathesis: cases made from /openapi.json; no 5xx, and answers as the document says, for each group of routes.

The control routes are called with the admin key, except those after which the instance waits for another call.
"""

from __future__ import annotations

import functools
from pathlib import Path

from checking import ADMIN_KEY, URL, check, expect, run_checks, run_module

MAX_EXAMPLES = 5
"""Random cases of each operation, beside the systematic ones of the schema's limits."""
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("response_headers_conformance", "unsupported_method", "allow_header_conformance", "missing_required_header"),
    "ignored_auth",
)
GROUPS = {
    "completions": "^/v1/completions$",
    "chat completions": "^/v1/chat/completions(/batch)?$",
    "rendered prompts": "/render$",
    "responses": "^/v1/responses",
    "messages": "^/v1/messages",
    "generation by token ids": "^/(inference/v1/|skyrl/v1/|)generate$",
    "tokens": "^/(de)?tokenize",
    "embeddings and scores": "embeddings|pooling|classify|score|rerank",
    "/invocations": "^/invocations$",
    "control": "pause|continue|sleep|wake_up|reset_|flush_|abort_|liveness|world_size|collective_rpc",
    "weights": "weight|memory|lora_adapter",
}
"""Name of each group of routes → pattern of their paths."""
EXCLUDED = "^/(pause|sleep|release_|init_|start_weight_update|begin_weight_update|update_weights)"
"""Pattern of the paths of control routes after which the instance waits for another call."""
CONFIGURATION = """
hooks = "hooks"

[checks.not_a_server_error]
# a request whose own `timeout` is too short is answered by 504
expected-statuses = ["2xx", "3xx", "4xx", 504]
"""
HOOKS = """
import schemathesis


@schemathesis.hook
def before_call(context, case, kwargs):
    # a chat without a limit may go on to the end of the context
    if case.operation.path.startswith("/v1/chat/completions") and isinstance(case.body, dict):
        if case.body.get("max_tokens") is None and case.body.get("max_completion_tokens") is None:
            case.body["max_tokens"] = 4
"""


def run_cases(included: str = "", excluded: str = EXCLUDED) -> None:
    """Run the cases of routes whose paths match a pattern and not the other. Raises `RuntimeError` if a case fails."""
    Path("schemathesis.toml").write_text(CONFIGURATION)
    Path("hooks.py").write_text(HOOKS)
    output = run_module(
        *("schemathesis.cli", "run", f"{URL}/openapi.json"),
        *(f"--include-path-regex={included}", f"--exclude-path-regex={excluded}"),
        *("--checks", ",".join(CHECKS), f"--max-examples={MAX_EXAMPLES}", "--phases=coverage,fuzzing", "--seed=1"),
        *("--header", f"Authorization: Bearer {ADMIN_KEY}", "--request-timeout=60"),
        *("--continue-on-failure", "--generation-database=none", "--no-color"),
    )
    expect("Test cases" in output, "no cases were run:", output[-200:])


if __name__ == "__main__":
    for name, paths in GROUPS.items():
        check(name)(functools.partial(run_cases, paths))
    check("other routes")(functools.partial(run_cases, excluded="|".join([EXCLUDED, *GROUPS.values()])))
    run_checks()
