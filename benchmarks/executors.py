"""Comparison of executors or other options of `LLM` at the same work, in turn: medians, and ratios to the first.

python benchmarks/executors.py '{"executor": "processes", "tensor_parallel_size": 2}' \\
                               '{"executor": "ray", "tensor_parallel_size": 2}' [--model dense-tiny] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from peer_engines import PeerEngine
from peer_jobs import Offline
from peer_rows import OFFLINE
from shapes import SHAPES, make

from eagleray_bench.alternating_runs import AlternatingRuns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", type=json.loads, help="options of LLM, as JSON")
    parser.add_argument("--model", default="dense-tiny", choices=list(SHAPES))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-benchmarks")
    arguments = parser.parse_args()
    checkpoint = make(arguments.model, arguments.directory)
    names = [figure for figure, _ in OFFLINE.values()]
    runs: list[list[dict[str, float]]] = [[] for _ in arguments.variants]
    for index in AlternatingRuns(count=arguments.repeat).order(range(len(arguments.variants))):
        runs[index].append(_measure(checkpoint, arguments.variants[index], names))
    print(f"{arguments.model}, {arguments.repeat} runs in turn: median (lowest to highest); ratio of the medians")
    for index, variant in enumerate(arguments.variants):
        print(json.dumps(variant))
        for key, title in OFFLINE.values():
            figures = [run[key] for run in runs[index]]
            ratio = statistics.median(figures) / statistics.median(run[key] for run in runs[0])
            spread = f"({min(figures):.2f} to {max(figures):.2f})"
            print(f"  {title:<34}{statistics.median(figures):>10.2f} {spread:<22}{ratio:.3f}")


def _measure(checkpoint: Path, variant: dict[str, Any], names: list[str]) -> dict[str, float]:
    """Measure in a process of its own, because executors may disturb each other even when they are idle."""
    with closing(Offline(PeerEngine("eagleray"), checkpoint, variant)) as opened:
        return opened.measure(names, 0)


if __name__ == "__main__":
    main()
