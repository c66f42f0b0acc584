"""scripts/chaos.py with hosts that die and links that are disconnected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_hosts import why_impossible

pytestmark = pytest.mark.hosts

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"


@pytest.mark.timeout(400)
def test_chaos_hosts_that_die_or_are_disconnected_fail_or_change_no_request(tmp_path):
    if reason := why_impossible():
        pytest.skip(reason)
    log = tmp_path / "log"
    options = (
        "--hosts",
        "3",
        "--requests",
        "300",
        "--concurrency",
        "4",
        "--every",
        "4",
        "--settled",
        "6",
        "--seed",
        "3",
    )
    words = [sys.executable, str(SCRIPT), "--json", "--log", str(log), *options]
    run = subprocess.run(words, capture_output=True, text=True, timeout=380)
    assert run.stdout, run.stderr
    report = json.loads(run.stdout)
    assert run.returncode == 0 and report["ok"], f"{report}\n{log.read_text()}"
    assert report["restarts"] > 0
    assert any("host" in blow for blow in report["blows"]), report["blows"]
