"""API keys of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eagleray.cli.api_key import client_key

PROGRAM = """
import sys
from eagleray.cli.api_key import hide_api_keys
print(hide_api_keys(sys.argv[1:]), *sys.argv[1:], flush=True)
sys.stdin.read()
"""
ARGUMENTS = [
    "serve",
    "m",
    "--api-key",
    "secret-1",
    "sécret-2",
    "--port",
    "1",
    "--api-key=secret-3",
    "--host",
    "secret-1x",
    "--admin_api_key",
    "secret-4",
]


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such memory")
def test_hide_api_keys_overwrites_them_where_others_see_them() -> None:
    command = [sys.executable, "-c", PROGRAM, *ARGUMENTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["True", *ARGUMENTS], "the program itself still has them"
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
        process.communicate()
    hidden = ["serve", "m", "--api-key", "*" * 8, "*" * 9, "--port", "1", "--api-key=********", "--host", "secret-1x"]
    hidden += ["--admin_api_key", "*" * 8]
    assert shown[3:-1] == hidden


def test_client_key_is_the_one_given_else_one_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLERAY_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert client_key(None) is None
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert client_key(None) == "theirs"
    monkeypatch.setenv("EAGLERAY_API_KEY", "ours,second")
    assert client_key(None) == "ours"
    assert client_key("given") == "given"
