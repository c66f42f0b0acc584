"""examples/rl: a trainer on the demo model, whose engine is killed in the middle of an update."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "rl" / "train.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rl_example_learns_although_its_engine_is_killed():
    """The script checks rewards, versions and log-probabilities by itself."""
    command = [sys.executable, str(SCRIPT), "--steps", "12", "--kill-at", "3"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=390)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "kill -9" in run.stdout
    updates = re.findall(r"^step +\d+: .* in (\d+) attempt", run.stdout, re.MULTILINE)
    assert updates == ["1", "1", "2", *["1"] * 9]
