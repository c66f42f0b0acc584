"""examples/: the blocks of each README that are marked `run`, one after the other, in a directory of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from documented_commands import RUN, Block, blocks, commands

pytestmark = [pytest.mark.examples, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__")
SECONDS = 540.0
BUILT_IN = {":", "cd", "export", "kill", "wait"}


def run_blocks(folder: Path) -> list[Block]:
    page = folder / "README.md"
    return [block for block in blocks(page.name, page.read_text("utf-8")) if RUN in block.marks]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_example_runs_as_its_page_says(folder, tmp_path):
    found = run_blocks(folder)
    assert found, f"{folder}/README.md has no block that is marked `run`"
    assert f"]({folder.name})" in (ROOT / "examples" / "README.md").read_text(), "the table of examples lacks it"
    programs = Path(sys.executable).parent
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join((str(programs), os.environ["PATH"]))
    for block in found:
        for command in commands(block.text):
            if command.program not in BUILT_IN and shutil.which(command.program, path=path) is None:
                pytest.skip(f"{command.program} is not installed")
        run(block, cwd=tmp_path, env={**os.environ, "PATH": path})


def run(block: Block, *, cwd: Path, env: dict[str, str]) -> None:
    """Run a block in a session of its own, of which nothing is left afterwards. Its output is the test's."""
    shell = ["bash", "-euo", "pipefail", "-c", block.text]
    process = subprocess.Popen(shell, cwd=cwd, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        assert process.wait(SECONDS) == 0, block
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
