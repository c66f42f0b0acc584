"""What `eagleray serve` does when its processes end, are ended, or cannot start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import pytest
from checkpoints import make_checkpoint
from serving import END_SECONDS, serve, wait_until_gone


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3"))


LONG = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True, "temperature": 0}
OPTIONS = ("--served-model-name", "m", "--log-level", "debug", "--max-model-len", "10000")


def sockets_left() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("eagleray-*/*"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = sockets_left()
    yield
    assert sockets_left() <= before


def first_events(server, count: int):
    """A stream that has begun: its lines, as they come."""
    stream = httpx.stream("POST", server.url + "/completions", json=LONG | {"model": "m"}, timeout=60)
    lines = stream.__enter__().iter_lines()
    for _ in range(count):
        next(lines)
    return lines


def test_a_killed_engine_is_named_to_its_clients_and_to_the_operator(checkpoint):
    with serve(checkpoint, *OPTIONS) as server:
        lines = first_events(server, 3)
        pids = server.children
        os.kill(server.child("engine-0"), signal.SIGKILL)
        rest = [line for line in lines if line]
        assert '"error"' in rest[-2]
        assert "killed by SIGKILL" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 1
        assert "engine-0 is gone: it was killed by SIGKILL" in server.log
        wait_until_gone(pids, END_SECONDS)


def test_a_killed_supervisor_takes_its_processes_along(checkpoint):
    with serve(checkpoint, *OPTIONS) as server:
        pids = server.children
        assert len(pids) == 2
        server.end(signal.SIGKILL)
        wait_until_gone(pids, END_SECONDS)


def test_a_killed_api_server_ends_the_instance_with_its_cause(checkpoint):
    with serve(checkpoint, *OPTIONS) as server:
        pids = server.children
        os.kill(server.child("client-0"), signal.SIGKILL)
        assert server.wait() == 1
        assert "client-0 is gone: it was killed by SIGKILL" in server.log
        wait_until_gone(pids, END_SECONDS)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_finishes_what_runs_and_refuses_the_rest(checkpoint, how):
    with serve(checkpoint, *OPTIONS) as server:
        lines = first_events(server, 3)
        pids = server.children
        server.process.send_signal(how)
        server.wait_for("stopping", 10)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
        assert server.wait() == 0
        wait_until_gone(pids, END_SECONDS)


def test_a_second_signal_ends_it_at_once(checkpoint):
    with serve(checkpoint, *OPTIONS, "--shutdown-timeout", "600") as server:
        lines = first_events(server, 3)
        drain = threading.Thread(target=lambda: [None for _ in ignore_errors(lines)], daemon=True)
        drain.start()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping", 10)
        server.process.send_signal(signal.SIGTERM)
        server.wait()
        drain.join(END_SECONDS)
        assert not drain.is_alive()


def ignore_errors(lines):
    try:
        yield from lines
    except httpx.HTTPError:
        return


def refusal(*arguments: str) -> str:
    """What `eagleray serve` says when it cannot start; it must be one sentence, not a traceback."""
    run = subprocess.run(
        [sys.executable, "-m", "eagleray.cli.main", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    return run.stderr.strip().splitlines()[-1]


def test_a_port_in_use(checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refusal(checkpoint, "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}" in message


def test_a_model_that_is_not_there():
    assert "there is no such directory" in refusal("/no/such/model", "--port", "0")


def test_a_truncated_weight_file_is_named(checkpoint, tmp_path):
    for file in Path(checkpoint).iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    message = refusal(str(tmp_path), "--port", "0")
    assert "model.safetensors" in message


def test_memory_for_less_than_one_sequence(checkpoint):
    message = refusal(checkpoint, "--port", "0", "--max-model-len", "4000", "--num-kv-blocks", "10")
    assert "160 tokens" in message
    assert "`max_model_len`" in message


def test_an_option_that_does_not_exist(checkpoint):
    assert "--tensor-parallel-size" in refusal(checkpoint, "--tensor-parallel-size", "2")
