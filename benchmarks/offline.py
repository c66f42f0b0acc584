"""Offline speed in the rows of the peers' table: one request, a long prompt, 16 and 32 requests, start to ready.

python benchmarks/offline.py [--models dense-0.6b ...] [--repeat 3] [--peer-python PATH] [--peer-preload LIB ...]
                             [--tensor-parallel-size N] [--pipeline-parallel-size N]

With `--peer-python`, a Python that has vLLM, the two run in turn in every repetition; the last column is the ratio of
the medians. Each measurement is a process of its own (`measure_offline.py`), the same program for both engines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shapes import SHAPES, make

ROWS = {
    "token_ms": "1 request, ms per token",
    "prompt_tokens_per_s": "prompt of 1,024, tokens/s",
    "batch16_s": "16 requests, 32 in / 64 out, s",
    "batch32_s": "32 requests, 128 in / 64 out, s",
    "ready_s": "start to ready, s",
}
HIGHER_IS_BETTER = {"prompt_tokens_per_s"}
TIMEOUT = 1800
PEER_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
PEER_WORKERS_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""For two workers: a core each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-benchmarks")
    parser.add_argument("--peer-python", help="a Python that has vLLM")
    parser.add_argument("--peer-preload", nargs="+", default=[], help="libraries that vLLM's documentation preloads")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every figure here")
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}

    engines = {"eagleray": sys.executable} | ({"vllm": arguments.peer_python} if arguments.peer_python else {})
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    print(f"| model | row | {' | '.join(engines)} |{' eagleray / vllm |' if len(engines) > 1 else ''}")
    print("|---" * (2 + len(engines) + (len(engines) > 1)) + "|")
    for model in arguments.models:
        checkpoint = make(model, arguments.directory)
        runs = figures[model] = {engine: [] for engine in engines}
        for _ in range(arguments.repeat):
            for engine, python in engines.items():
                runs[engine].append(measure(engine, python, checkpoint, options, arguments.peer_preload))
        show(model, runs)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


def measure(
    engine: str, python: str, checkpoint: Path, options: dict[str, Any], peer_preload: Sequence[str] = ()
) -> dict[str, float]:
    """One run of `measure_offline.py` in the given Python. `options`: more options of `LLM`."""
    environment = dict(os.environ)
    if engine == "vllm":
        environment |= PEER_ENVIRONMENT | {"LD_PRELOAD": ":".join(peer_preload)}
        if max(options.values()) > 1:
            environment |= PEER_WORKERS_ENVIRONMENT
            options = options | {"distributed_executor_backend": "mp"}
    script = Path(__file__).with_name("measure_offline.py")
    run = subprocess.run(
        [python, str(script), engine, str(checkpoint), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment,
    )
    if run.returncode != 0:
        sys.exit(f"{engine} failed on {checkpoint}:\n{run.stderr[-3000:]}")
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))


def show(model: str, runs: dict[str, list[dict[str, float]]]) -> None:
    for key, title in ROWS.items():
        medians = {engine: statistics.median(run[key] for run in of) for engine, of in runs.items()}
        cells = [f"{median:,.2f}" for median in medians.values()]
        if len(medians) > 1:
            ratio = medians["eagleray"] / medians["vllm"]
            cells.append(f"{ratio:.2f} {'(higher is better)' if key in HIGHER_IS_BETTER else ''}".strip())
        print(f"| {model} | {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
