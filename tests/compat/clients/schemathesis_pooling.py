"""schemathesis with the routes that a pooling model answers, as in `schemathesis_cases`."""

from __future__ import annotations

import functools

from checking import check, run_checks
from schemathesis_cases import run_cases

GROUPS = {"embeddings": "embeddings|pooling", "classes and scores": "classify|score", "ranks": "rerank"}
"""Name of each group of routes → pattern of their paths."""

for name, paths in GROUPS.items():
    check(name)(functools.partial(run_cases, paths))

if __name__ == "__main__":
    run_checks()
