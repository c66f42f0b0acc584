"""schemathesis: a bounded number of cases made from /openapi.json; no 5xx, and answers as the document says."""

from __future__ import annotations

from checking import URL, check, expect, run_checks, run_module

MAX_EXAMPLES = 3
"""Cases of each operation and phase."""
CONTROL_ROUTES = "pause|resume|sleep|wake_up|weight|abort|release_kv|reset_|collective_rpc|lora_adapter"
"""Routes that stop or change the instance, which other requests would then wait for."""


@check("no 5xx, and answers as the schema says")
def cases():
    output = run_module(
        "schemathesis.cli",
        "run",
        f"{URL}/openapi.json",
        "--checks=not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        f"--max-examples={MAX_EXAMPLES}",
        f"--exclude-path-regex={CONTROL_ROUTES}",
        "--phases=examples,fuzzing",
        "--seed=1",
        "--request-timeout=60",
        "--generation-database=none",
        "--no-color",
    )
    expect("Test cases" in output, "no cases were run:", output[-200:])


if __name__ == "__main__":
    run_checks()
