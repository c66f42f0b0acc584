"""scripts/chaos.py: clients notice a pause and nothing else. A short form, and the one that `make chaos` runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

FEW_FAULTS = ("--faults", "20", "--heartbeat-timeout", "2")
"""A busy machine may start processes more slowly than they are killed, so the faults end before the load."""
SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


def chaos(log: Path, *arguments: str, seconds: float) -> dict[str, Any]:
    """Return the report of a run, which must be good. A run that takes too long is not killed, but told to stop its
    server."""
    words = [sys.executable, str(SCRIPT), "--json", "--log", str(log), *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            said, error = run.communicate(timeout=seconds)
        except BaseException:
            run.terminate()
            raise
    assert said, error
    report: dict[str, Any] = json.loads(said)
    assert run.returncode == 0, f"{report}\n{log.read_text()}"
    return report


def check(report: dict[str, Any], num_requests: int) -> None:
    assert report["requests"] == num_requests
    assert report["failures"] == report["mismatches"] == report["trouble"] == []
    assert report["leaks"] and not any(report["leaks"].values())
    assert report["restarts"] > 0


@pytest.mark.timeout(180)
def test_chaos_processes_killed_no_request_fails_or_changes(checkpoint, tmp_path):
    """Processes may be killed faster than a busy machine starts them, so the faults end before the load."""
    faults = ("--faults", "4", "--every", "1", "--settled", "3", "--heartbeat-timeout", "1")
    options = ("--model", str(checkpoint), "--requests", "30", "--concurrency", "4", *faults)
    check(chaos(tmp_path / "log", *options, seconds=170), 30)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("sharing", "every"), [((), "4"), (("--expert-parallel",), "8")], ids=["alone", "experts"])
def test_chaos_steered_meanwhile_no_request_fails_or_changes(tmp_path, sharing, every):
    """Pauses, sleeps and updates go on while processes are killed."""
    options = (*FEW_FAULTS, "--requests", "100", "--concurrency", "6", "--every", every, "--settled", every)
    report = chaos(tmp_path / "log", "--steer", *options, *sharing, seconds=380)
    check(report, 100)
    assert {"pause", "resume", "sleep", "wake_up", "update_weights"} <= report["control_calls"].keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [(), ("--", "--tensor-parallel-size", "2")], ids=["alone", "workers"])
def test_chaos_weights_pushed_meanwhile_every_token_is_of_its_version(tmp_path, workers):
    options = (*FEW_FAULTS, "--requests", "120", "--concurrency", "6", "--every", "6", "--settled", "5")
    report = chaos(tmp_path / "log", "--weight-updates", "3", *options, *workers, seconds=580)
    check(report, 120)
    assert report["trainer"]["committed"] > 3
    assert report["answers_of_several_versions"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_chaos_expert_parallel_engines_killed_no_request_fails_or_changes(tmp_path):
    """The embedded model has experts; every request asks which of them computed its tokens."""
    options = (*FEW_FAULTS, "--requests", "200", "--concurrency", "4", "--every", "8", "--settled", "8")
    check(chaos(tmp_path / "log", "--expert-parallel", "--routed-experts", *options, seconds=380), 200)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [(), ("--", "--tensor-parallel-size", "2")], ids=["alone", "workers"])
def test_chaos_thousand_requests_none_fails_or_changes(checkpoint, tmp_path, workers):
    options = ("--model", str(checkpoint), "--requests", "1000", "--faults", "100", "--seed", "1")
    check(chaos(tmp_path / "log", *options, *workers, seconds=880), 1000)
