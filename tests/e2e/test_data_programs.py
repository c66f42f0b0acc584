"""Programs with stages for Ray Data, each with a Ray cluster of its own: the benchmark and the examples."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoints import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
SECONDS = 300.0
NUM_ROWS = 3000
OPTIONS = {"EAGLERAY_NUM_THREADS": "1", "EAGLERAY_NUM_KV_BLOCKS": "256", "EAGLERAY_MAX_NUM_SEQS": "16"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("data"), "qwen3"))


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    directory = tempfile.mkdtemp(prefix="er-")  # short: the path of a Unix socket has at most 107 characters
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    yield {**env, **OPTIONS, "RAY_TMPDIR": directory, "RAY_AUTH_MODE": "disabled"}
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def started(environment: dict[str, str], log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and kill it at the end."""
    with log.open("wb") as file:
        program = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        yield program
    finally:
        program.kill()
        program.wait()


def run(environment: dict[str, str], log: Path, *words: str) -> str:
    with started(environment, log, *words) as program:
        assert program.wait(SECONDS) == 0, log.read_text()
    return log.read_text()


def test_benchmark_rows_come_once_though_processes_are_killed(
    environment: dict[str, str], checkpoint: str, tmp_path: Path
) -> None:
    words = ["--rows", "8000", "--kill-every", "3", "--cpus", "4", "--model", checkpoint]
    said = run(environment, tmp_path / "log", "benchmarks/ray_data.py", *words)
    last = next(line for line in said.splitlines() if line.startswith("stage, a kill every"))
    assert "0 lost, 0 repeated, 0 failed" in last
    assert "kills of an actor" in last
    assert "kills of an engine" in last


def test_example_generate_that_was_killed_computes_only_the_missing_rows(
    environment: dict[str, str], checkpoint: str, tmp_path: Path
) -> None:
    prompts, rows = tmp_path / "prompts", tmp_path / "answers" / "rows"
    prompts.mkdir()
    table = pa.table({"id": range(NUM_ROWS), "prompt": [f"Row {number}" for number in range(NUM_ROWS)]})
    pq.write_table(table, prompts / "rows.parquet")
    words = ["examples/ray_data/generate.py", "--model", checkpoint]
    words += ["--prompts", str(prompts), "--answers", str(rows.parent)]

    with started(environment, tmp_path / "log", *words) as program:
        deadline = time.monotonic() + SECONDS
        while not list((rows.parent / "checkpoint").glob("*[0-9].parquet")):  # those of pending files end in .pending
            assert program.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.01)
    committed = {path.stem for path in (rows.parent / "checkpoint").glob("*[0-9].parquet")}
    before = {path: path.stat() for path in rows.glob("*.parquet") if path.stem.rpartition("-")[0] in committed}
    assert before

    run(environment, tmp_path / "log", *words)
    ids = Counter(number for path in rows.glob("*.parquet") for number in pq.read_table(path)["id"].to_pylist())
    assert ids == Counter(range(NUM_ROWS))
    assert all(path.stat().st_mtime_ns == stat.st_mtime_ns for path, stat in before.items())


def test_example_embed_finds_a_close_line(environment: dict[str, str], checkpoint: str, tmp_path: Path) -> None:
    words = ["--convert", "--model", checkpoint, "--vectors", str(tmp_path / "vectors")]
    said = run(environment, tmp_path / "log", "examples/ray_data/embed.py", *words)
    assert "vectors of 64 features" in said
    assert "The line that is closest to " in said
