"""scripts/fuzz.py, a short form: clients notice nothing of the hostile ones. `make fuzz` runs all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz.py"
ATTACKS = ("random-bodies", "closed-after-an-event", "hosts")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_fuzz_hostile_requests_other_clients_notice_nothing(tmp_path):
    words = [word for name in ATTACKS for word in ("--attack", name)]
    log = tmp_path / "log"
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--seconds", "15", "--seed", "1", "--log", str(log)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}\n{log.read_text()}"
