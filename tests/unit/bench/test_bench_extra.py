"""`eagleray bench` needs the libraries of an extra, and the other commands do without the benchmarks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from eagleray.cli.main import main


@pytest.mark.parametrize("name", ["aiohttp", "matplotlib"])
def test_bench_without_a_library_of_the_extra_is_a_user_error(monkeypatch, capsys, name):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find_spec(wanted))
    assert main(["bench", "serve"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"eagleray: error: `eagleray bench` needs {name}: pip install {name}"


def test_help_of_all_commands_imports_neither_benchmarks_nor_their_libraries():
    code = (
        "import sys\n"
        "from eagleray.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('eagleray_bench', 'aiohttp', 'matplotlib', 'numpy') if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
