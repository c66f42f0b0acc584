"""The rows of the peers' table, and the jobs that measure them.

A job is one process, or one server, of one engine, and gives the figures of several rows. Names of rows are
`MODEL/FIGURE`, `MODEL/tp2/FIGURE` and the like for several workers, and `MODEL/http8/FIGURE` for 8 streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from shapes import SHAPES

STREAMS = (1, 8, 32)
LONG_LEN = 8192 + 128
PARALLEL: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
QUANTIZED: dict[str, dict[str, Any]] = {"int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
"""Formats that eagleray is compared in with its own bfloat16, and with the same number of bits of llama.cpp."""
OFFLINE = {
    "token": ("token_ms", "1 request, ms per token"),
    "prompt": ("prompt_tokens_per_s", "prompt of 1,024, tokens/s"),
    "first-prompts": ("first_prompts_tokens_per_s", "first 4 prompts of 1,024 of a new engine, tokens/s"),
    "batch16": ("batch16_s", "16 requests, 32 in / 64 out, s"),
    "batch32": ("batch32_s", "32 requests, 128 in / 64 out, s"),
    "start": ("ready_s", "start to ready, s"),
    "memory": ("peak_anonymous_mib", "peak anonymous memory, MiB"),
}
LONG = {
    "long-prompt": ("long_prompt_tokens_per_s", "prompt of 8,192, tokens/s"),
    "long-token": ("long_token_ms", "after a prompt of 8,192, ms per token"),
}
HTTP = {
    "ttft-p50": "time to first token p50, ms",
    "ttft-p99": "time to first token p99, ms",
    "tpot-p50": "time per output token p50, ms",
    "tpot-p99": "time per output token p99, ms",
    "tokens": "output tokens/s",
}
HIGHER_IS_BETTER = {"prompt", "first-prompts", "long-prompt", "tokens"}
USUAL = [
    *("dense-0.6b/token", "dense-0.6b/prompt", "dense-0.6b/batch16", "dense-0.6b/batch32"),
    *("moe-1b/token", "moe-1b/prompt", "moe-1b/batch16", "moe-1b/batch32"),
    *("dense-tiny/token", "dense-tiny/batch32", "moe-tiny/token", "moe-tiny/batch32"),
    *("dense-0.6b/start", "dense-tiny/start", "dense-0.6b/long-*", "dense-tiny/long-*"),
    *("dense-0.6b/memory", "moe-1b/memory", "dense-tiny/memory", "dense-tiny/http*"),
    *("dense-tiny/tp2/token", "dense-tiny/tp2/batch32", "dense-0.6b/tp2/token", "dense-0.6b/tp2/batch32"),
    *("dense-tiny/pp2/token", "dense-tiny/pp2/batch32", "moe-tiny/ep2/token", "moe-tiny/ep2/batch32"),
    *("dense-0.6b/int?/token", "dense-0.6b/int?/prompt", "dense-0.6b/int?/batch*", "moe-1b/int?/token"),
]
"""Rows that are measured without `--rows`."""


@dataclass(frozen=True)
class PeerJob:
    """Run of `measure_offline.py`, or of a server, with these options."""

    model: str
    is_http: bool = False
    parallel: str = ""
    quantization: str = ""
    is_long: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of `LLM`."""
        chosen = PARALLEL.get(self.parallel, {}) | QUANTIZED.get(self.quantization, {})
        return chosen | ({"max_model_len": LONG_LEN} if self.is_long else {})

    def groups(self, rows: Sequence[PeerRow]) -> list[list[PeerRow]]:
        """Group the rows that are measured together: those of one load of a server; else each alone, memory last."""
        if not self.is_http:
            return [[row] for row in sorted(rows, key=lambda row: row.figure == "peak_anonymous_mib")]
        by_load: dict[str, list[PeerRow]] = {}
        for row in rows:
            by_load.setdefault(row.figure.partition("/")[0], []).append(row)
        return list(by_load.values())


@dataclass(frozen=True)
class PeerRow:
    name: str
    title: str
    job: PeerJob
    figure: str
    """Name of the figure among those of the job; for an HTTP job `STREAMS/FIGURE`."""

    @property
    def is_higher_better(self) -> bool:
        return self.name.rpartition("/")[2] in HIGHER_IS_BETTER


def all_rows() -> Iterator[PeerRow]:
    """Yield the rows of every model; expert parallelism only for models with experts."""
    for model in SHAPES:
        for parallel in ["", *PARALLEL]:
            if parallel == "ep2" and "num_experts" not in SHAPES[model]:
                continue
            for what, (figure, title) in OFFLINE.items():
                name = "/".join(filter(None, (model, parallel, what)))
                yield PeerRow(name, _with(title, parallel), PeerJob(model, parallel=parallel), figure)
        for kind in QUANTIZED:
            for what, (figure, title) in OFFLINE.items():
                yield PeerRow(f"{model}/{kind}/{what}", _with(title, kind), PeerJob(model, quantization=kind), figure)
        for what, (figure, title) in LONG.items():
            yield PeerRow(f"{model}/{what}", title, PeerJob(model, is_long=True), figure)
        for streams in STREAMS:
            for what, title in HTTP.items():
                name = f"{model}/http{streams}/{what}"
                yield PeerRow(
                    name, _with(title, f"http, {streams} at once"), PeerJob(model, is_http=True), f"{streams}/{what}"
                )


def choose(patterns: Sequence[str]) -> list[PeerRow]:
    """Return the rows whose names match one of `patterns`. Raises `SystemExit` if a pattern matches no row."""
    rows = list(all_rows())
    for pattern in patterns:
        if not any(fnmatch(row.name, pattern) for row in rows):
            raise SystemExit(f"--rows {pattern}: no row has such a name; --list shows them")
    return [row for row in rows if any(fnmatch(row.name, pattern) for pattern in patterns)]


def _with(title: str, where: str) -> str:
    return f"{where}: {title}" if where else title
