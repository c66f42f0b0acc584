"""The load of the engines as a header of an answer, for proxies that balance by it (ORCA, Open Request Cost
Aggregation)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from eagleray.messages.outputs import EngineStats

FORMAT_HEADER = "endpoint-load-metrics-format"
LOAD_HEADER = "endpoint-load-metrics"

LOAD_HEADERS: dict[str, dict[str, Any]] = {
    FORMAT_HEADER: {
        "type": "string",
        "description": f"TEXT or JSON: a whole answer has the load of the engines in this form as `{LOAD_HEADER}`.",
    }
}
"""JSON schemas of the headers of requests, by name."""


def load_header(wanted: str, stats: Collection[EngineStats]) -> dict[str, str]:
    """Return the header with the load of all engines together, in the `wanted` form. Empty for an unknown form, as in
    vLLM, and without stats."""
    if not stats:
        return {}
    num_blocks = sum(each.num_kv_blocks for each in stats)
    num_free_blocks = sum(each.num_free_kv_blocks for each in stats)
    load = {
        "kv_cache_usage_perc": (num_blocks - num_free_blocks) / max(1, num_blocks),
        "num_requests_waiting": float(sum(each.num_waiting for each in stats)),
    }
    match wanted.lower():
        case "text":
            return {LOAD_HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())}
        case "json":
            return {LOAD_HEADER: "JSON " + msgspec.json.encode({"named_metrics": load}).decode()}
    return {}
