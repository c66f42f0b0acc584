"""`eagleray completion`: the script for bash, used by bash."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eagleray.cli import bench
from eagleray.cli.completion import make_script
from eagleray.cli.main import main

COMPLETE = """
source "$0"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p eagleray | sed 's/.*-F \\([^ ]*\\).*/\\1/') eagleray "${@: -1}" "${@: -2:1}"
echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "eagleray.bash"
    path.write_text(make_script("bash"))
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run"], "run-batch"),
        (["serve", "--tensor"], "--tensor-parallel-size"),
        (["serve", "--tensor-parallel-size", "2", "--executor", "ra"], "ray ray-graph"),
        (["serve", "--enforce"], ""),  # an option of vLLM that is accepted, but not documented
        (["bench", "lat"], "latency"),
        (["completion", ""], "bash zsh fish"),
    ],
)
def test_completion_script_completes_in_bash(script, words, expected):
    command = ["bash", "-c", COMPLETE, str(script), "eagleray", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_script_of_other_shells_has_options_and_values(shell):
    script = make_script(shell)
    assert "data-parallel-backend" in script and "ray-graph" in script


def test_completion_without_shtab_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err


def test_completion_without_libraries_of_bench_leaves_its_options_out(monkeypatch):
    monkeypatch.setattr(bench, "REQUIRED", ("nowhere",))
    script = make_script("bash")
    assert "--data-parallel-backend" in script and "--random-range-ratio" not in script
