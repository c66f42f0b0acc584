"""The blocks of documents that are marked `run` do what they say, against servers of the embedded model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from documented_commands import RUN, Block, Command, blocks, commands
from serving import serve

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]
SERVER = re.compile(r"\b(?:localhost|127\.0\.0\.1):8000\b")
SECONDS = 120.0
WRAPPER = """#!/bin/sh
case "$1 $2" in
chat\\ * | complete\\ *) command=$1; shift; set -- "$command" --url {url}/v1 "$@" ;;
top\\ * | scale\\ * | restart\\ *) command=$1; shift; set -- "$command" --url {url} "$@" ;;
bench\\ serve) shift 2; set -- bench serve --base-url {url} "$@" ;;
esac
exec {python} -m eagleray.cli.main "$@"
"""
"""Program `eagleray` whose requests go to the server of the test."""
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
"""Documents without those of examples/, which `make examples` executes."""
FOUND = [
    block
    for path in DOCUMENTS
    for block in blocks(str(path.relative_to(ROOT)), path.read_text("utf-8"))
    if RUN in block.marks
]


def is_server(command: Command) -> bool:
    return command.program == "eagleray" and command.words[1] == "serve"


def serves(block: Block) -> bool:
    return block.language == "sh" and all(is_server(command) for command in commands(block.text))


@pytest.fixture(scope="module")
def server():
    with serve() as server:
        yield server


@pytest.fixture
def environment(server, tmp_path):
    """Variables for a process that finds `eagleray`, with an own directory of files."""
    program = tmp_path / "bin/eagleray"
    program.parent.mkdir()
    program.write_text(WRAPPER.format(url=server.url.removesuffix("/v1"), python=shlex.quote(sys.executable)))
    program.chmod(0o755)
    folders = (str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"])
    return {**os.environ, "PATH": os.pathsep.join(folders)}


@pytest.mark.parametrize("block", [block for block in FOUND if not serves(block)], ids=str)
def test_block_runs(block, server, environment, tmp_path):
    address = server.url.removeprefix("http://").removesuffix("/v1")
    text = SERVER.sub(address, block.text).replace(".venv/bin/", "")
    interpreter = ["bash", "-euo", "pipefail"] if block.language == "sh" else [sys.executable]
    run = subprocess.run(
        [*interpreter, "-c", text],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert '{"error":' not in run.stdout, run.stdout


@pytest.mark.parametrize("block", [block for block in FOUND if serves(block)], ids=str)
def test_server_of_block_starts_and_stops(block):
    for command in commands(block.text):
        with serve(*command.words[2:]) as server:
            assert server.end() == 0, server.log
