"""scripts/trace_request.py: a streamed completion passes through a bounded number of files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "trace_request.py"
MAX_FILES = 60
"""Files of the API server and the engine together; lower it when a change needs fewer."""


def test_streamed_completion_enters_no_more_files_than_the_limit():
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--limit", str(MAX_FILES)], capture_output=True, text=True, timeout=150
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert "engine/loop.py" in run.stdout and "server/openai/completions.py" in run.stdout
