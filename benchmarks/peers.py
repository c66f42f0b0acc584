"""Comparison of eagleray and its peers in one run, in turn: medians, and the ratios to each peer.

python benchmarks/peers.py [--rows 'dense-tiny/*' …] [--repeat 3] [--json FILE] [--list]
                           [--peer-python VLLM/bin/python [--peer-preload LIB …]] [--llama-python LLAMA/bin/python]

`--peer-python` is a Python that has vLLM, `--llama-python` one that has llama-cpp-python. Without `--rows` the rows of
`peer_rows.USUAL` are measured, which takes hours with the large models. For each job every engine starts once, in
processes of its own; then the engines are measured in turn, figure by figure, while the others are idle, so that
changes of the machine affect all of them. Rows of start times repeat the start, too. A job that fails leaves its rows
empty, and its cause is printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from measure_limit import Limit
from peer_engines import LIMIT, OWN_BF16, PeerEngine
from peer_jobs import JobFailed, Offline, Served, open_job
from peer_rows import USUAL, PeerJob, PeerRow, all_rows, choose

Figures = dict[tuple[str, str], list[float]]
"""Figures of every repetition, by row and engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=USUAL, metavar="PATTERN", help="rows by name, with * and ?")
    parser.add_argument("--list", action="store_true", help="show the names of all rows and end")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-benchmarks")
    parser.add_argument("--peer-python", help="a Python that has vLLM")
    parser.add_argument("--peer-preload", nargs="+", default=[], help="libraries that vLLM's documentation preloads")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--json", type=Path, help="write every figure here")
    arguments = parser.parse_args()
    if arguments.list:
        usual = {row.name for row in choose(USUAL)}
        for row in all_rows():
            print(f"{'*' if row.name in usual else ' '} {row.name:<32} {row.title}")
        return
    if arguments.repeat < 1:
        sys.exit("--repeat must be at least 1")
    engines = [PeerEngine("eagleray"), PeerEngine(OWN_BF16)]
    if arguments.peer_python:
        engines.append(PeerEngine("vllm", arguments.peer_python, arguments.peer_preload))
    if arguments.llama_python:
        engines.append(PeerEngine("llama.cpp", arguments.llama_python))
    engines.append(PeerEngine(LIMIT))
    rows = choose(arguments.rows)
    figures: Figures = {}
    failures: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        measure_all(rows, engines, arguments.repeat, arguments.directory, figures, failures)
    finally:  # an interrupted run reports the figures so far
        print(table(rows, engines, figures))
        for failure in failures:
            print(f"\n{failure}")
        if arguments.json:
            arguments.json.write_text(json.dumps(as_json(rows, engines, figures, failures), indent=1) + "\n")


def measure_all(
    rows: Sequence[PeerRow],
    engines: Sequence[PeerEngine],
    repeat: int,
    directory: Path,
    figures: Figures,
    failures: list[str],
) -> None:
    """Measure every job with every engine `repeat` times, and add to `figures` and `failures`.

    An engine that failed at a job is left out of the rest of that job.
    """
    jobs: dict[PeerJob, list[PeerRow]] = {}
    for row in rows:
        jobs.setdefault(row.job, []).append(row)
    for job, of_job in jobs.items():
        with ExitStack() as stack:
            opened: dict[str, Offline | Served | Limit] = {}
            for engine in engines:
                if engine.can(job):
                    with _recording_failure(failures, engine.name, job):
                        _log(f"{engine.name} starts: {_name(job)}")
                        checkpoint = engine.checkpoint(job, directory)
                        opened[engine.name] = stack.enter_context(closing(open_job(job, engine, checkpoint)))
            for turn, group in itertools.product(range(repeat), job.groups(of_job)):
                for name in list(opened):
                    _log(f"{turn + 1}/{repeat} {name}: {', '.join(row.name for row in group)}")
                    with _recording_failure(failures, name, job):
                        found = opened[name].measure([row.figure for row in group], turn)
                        for row in group:
                            if row.figure in found:
                                figures.setdefault((row.name, name), []).append(found[row.figure])
                        continue
                    del opened[name]


@contextmanager
def _recording_failure(failures: list[str], engine: str, job: PeerJob) -> Iterator[None]:
    try:
        yield
    except JobFailed as error:
        failures.append(f"{engine} failed at {_name(job)}: {error}")


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[PeerRow], engines: Sequence[PeerEngine], figures: Figures) -> str:
    """Return a Markdown table of medians, and of eagleray's median divided by each peer's."""
    peers = [engine.name for engine in engines[1:]]
    headings = ["row", "what", *(engine.name for engine in engines), *(f"eagleray / {peer}" for peer in peers)]
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for row in rows:
        medians = _medians(row, engines, figures)
        cells = [row.name, row.title + (" (higher is better)" if row.is_higher_better else "")]
        cells += ["–" if (median := medians.get(engine.name)) is None else f"{median:,.2f}" for engine in engines]
        ratios = _ratios(medians)
        cells += ["–" if peer not in ratios else f"{ratios[peer]:.2f}" for peer in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_json(
    rows: Sequence[PeerRow], engines: Sequence[PeerEngine], figures: Figures, failures: Sequence[str]
) -> dict[str, object]:
    return {
        "machine": {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0]},
        "rows": {
            row.name: {
                "what": row.title,
                "higher_is_better": row.is_higher_better,
                "figures": {engine.name: figures.get((row.name, engine.name), []) for engine in engines},
                "medians": (medians := _medians(row, engines, figures)),
                "ratios": _ratios(medians),
            }
            for row in rows
        },
        "failures": list(failures),
    }


def _medians(row: PeerRow, engines: Sequence[PeerEngine], figures: Figures) -> dict[str, float]:
    found = {engine.name: figures.get((row.name, engine.name)) for engine in engines}
    return {name: statistics.median(values) for name, values in found.items() if values}


def _ratios(medians: Mapping[str, float]) -> dict[str, float]:
    """Return eagleray's median divided by each peer's; below 1 eagleray is better, unless higher is better."""
    ours = medians.get("eagleray")
    return {peer: ours / theirs for peer, theirs in medians.items() if peer != "eagleray" and ours is not None}


def _name(job: PeerJob) -> str:
    kind = "http" if job.is_http else job.parallel or job.quantization or ("long" if job.is_long else "offline")
    return f"{job.model}, {kind}"


if __name__ == "__main__":
    main()
