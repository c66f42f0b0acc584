"""Rows through a stage of Ray Data while its processes are killed: each row must come out once.

python benchmarks/ray_data.py --rows 100000 --kill-every 10 [--model CHECKPOINT] [--actors 1] [--json FILE]

Runs the same rows through `LLM.generate`, through the stage, and through the stage while every few seconds an engine or
a stage's actor, in turn, is killed with SIGKILL. Prints rows per second of each, as a ratio to `LLM.generate` too, and
exits with 1 if a row is lost, repeated or failed. It starts a Ray cluster of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray._private.state import actors

import eagleray.data
from eagleray import LLM

OBJECT_STORE_BYTES = 512 << 20
ID = "id"


@dataclass
class Outcome:
    """Counts of the rows by their result."""

    name: str
    num_rows: int
    seconds: float = 0.0
    num_lost: int = 0
    num_repeated: int = 0
    num_failed: int = 0
    kills: dict[str, int] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return not (self.num_lost or self.num_repeated or self.num_failed)

    @property
    def rows_per_second(self) -> float:
        return self.num_rows / self.seconds


class Killer:
    """Kills an engine and a stage's actor of this cluster in turn, every few seconds, until it is stopped."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._kinds = itertools.cycle(("engine", "actor"))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.kills: Counter[str] = Counter()

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _kill(self, kind: str) -> bool:
        """Kill a process of this kind, and return whether one was running."""
        pids = stage_actors() if kind == "actor" else [pid for actor in stage_actors() for pid in engines_of(actor)]
        if not pids:
            return False
        try:
            os.kill(pids[self.kills.total() % len(pids)], signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills[kind] += 1
        return True

    def _run(self) -> None:
        kind = next(self._kinds)
        while not self._stopped.wait(self._seconds):
            if self._kill(kind):
                kind = next(self._kinds)


def stage_actors() -> list[int]:
    """Return the processes of the actors of stages that are alive."""
    entries = [entry for entry in actors().values() if entry["State"] == "ALIVE"]
    return sorted(int(entry["Pid"]) for entry in entries if "StageActor" in entry["ActorClassName"])


def engines_of(pid: int) -> list[int]:
    """Return the engines that a process has started. The last word of their command lines is their label."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of processes that have just exited
        for child in Path(f"/proc/{pid}/task").glob("*/children"):
            for name in child.read_text().split():
                words = Path(f"/proc/{name}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                if words[-1].startswith(b"engine-"):
                    found.append(int(name))
    return found


def prompt_of(number: int) -> str:
    return f"Row {number} asks for the square of {number % 97}, which is"


def with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "prompt": prompt_of(row[ID])}


def run_llm(args: argparse.Namespace) -> Outcome:
    """Run the rows through `LLM.generate`, start of the engine included."""
    outcome = Outcome("LLM.generate", args.rows)
    began = time.perf_counter()
    with LLM(args.model, **args.options) as llm:
        prompts = [prompt_of(number) for number in range(args.rows)]
        outputs = llm.generate(prompts, params(args), use_tqdm=False, errors="return")
    outcome.seconds = time.perf_counter() - began
    outcome.num_failed = sum(not hasattr(output, "outputs") for output in outputs)
    return outcome


def run_stage(args: argparse.Namespace, kill_every: float | None) -> Outcome:
    """Run the rows through the stage, start of its actors included."""
    outcome = Outcome("stage" if kill_every is None else f"stage, a kill every {kill_every:g} s", args.rows)
    began = time.perf_counter()
    with Killer(kill_every) as killer:
        ds = ray.data.range(args.rows).map(with_prompt)
        ds = eagleray.data.generate(
            ds,
            args.model,
            sampling_params=params(args),
            num_actors=args.actors,
            rows_per_block=args.rows_per_block,
            **args.options,
        )
        count_rows(outcome, ds)
    outcome.seconds = time.perf_counter() - began
    outcome.kills = dict(killer.kills)
    return outcome


def count_rows(outcome: Outcome, ds: ray.data.Dataset) -> None:
    """Run the dataset, and count its rows by id."""
    seen: Counter[int] = Counter()
    for batch in ds.select_columns([ID, "error"]).iter_batches(batch_size=None, batch_format="pyarrow"):
        seen.update(batch[ID].to_pylist())
        outcome.num_failed += len(batch) - batch["error"].null_count
    outcome.num_lost = outcome.num_rows - len(seen)
    outcome.num_repeated = seen.total() - len(seen)


def params(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_tokens": args.max_tokens, "temperature": 1.0, "ignore_eos": True}


@contextlib.contextmanager
def own_cluster(num_cpus: int):
    """Start a Ray cluster, whose files are removed in the end."""
    directory = tempfile.mkdtemp(prefix="er-")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        _temp_dir=directory,
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def describe(outcome: Outcome, reference: Outcome) -> str:
    kills = ", ".join(f"{count} kills of an {kind}" for kind, count in sorted(outcome.kills.items()))
    return (
        f"{outcome.name}: {outcome.num_rows} rows in {outcome.seconds:.1f} s, {outcome.rows_per_second:.0f} rows/s, "
        f"{outcome.rows_per_second / reference.rows_per_second:.2f} of LLM.generate; {outcome.num_lost} lost, "
        f"{outcome.num_repeated} repeated, {outcome.num_failed} failed" + (f"; {kills}" if kills else "")
    )


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--kill-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--model", help="a checkpoint; by default the embedded model")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--rows-per-block", type=int, default=64)
    parser.add_argument("--cpus", type=int, default=os.cpu_count(), help="CPUs of the cluster")
    parser.add_argument("--rounds", type=int, default=1, help="number of times that all three run in turn")
    parser.add_argument("--options", type=json.loads, default={}, help="further options of LLM, as JSON")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(words)


def main() -> int:
    args = parse(sys.argv[1:])
    args.options = {"log_level": "warning", **args.options}
    outcomes: list[Outcome] = []
    for _ in range(args.rounds):
        reference = run_llm(args)
        with own_cluster(args.cpus):
            found = [reference, run_stage(args, None), run_stage(args, args.kill_every)]
        for outcome in found:
            print(describe(outcome, reference), flush=True)
        outcomes += found
    if args.json:
        rows = [{**asdict(one), "rows_per_second": one.rows_per_second} for one in outcomes]
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(outcome.is_right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
