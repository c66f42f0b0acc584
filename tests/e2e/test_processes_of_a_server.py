"""`eagleray serve` when its processes exit, are stopped, or cannot start."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from checkpoints import make_checkpoint
from processes import children_of
from serving import END_SECONDS, READY_SECONDS, serve, wait_until_gone

from eagleray.cli.serve import INTERRUPTED, SAME_SIGNAL_SECONDS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", max_position_embeddings=10_000))


LONG = {"prompt": "x", "ignore_eos": True, "stream": True, "temperature": 0}
OPTIONS = ("--served-model-name", "m", "--log-level", "debug", "--max-model-len", "10000")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch):
    """Have servers put their sockets where the test can see that none is left."""
    with tempfile.TemporaryDirectory(prefix="er-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert list(Path(directory).iterdir()) == []


@contextlib.contextmanager
def stream(server, max_tokens: int = 8000):
    """Open a stream, wait for its first line, and yield the rest of its lines."""
    request = LONG | {"model": "m", "max_tokens": max_tokens}
    with httpx.stream("POST", server.url + "/completions", json=request, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


NO_RESTARTS = ("--max-engine-restarts", "0")


@pytest.mark.grid  # the same with a worker, below
def test_serve_engine_given_up_is_named_to_clients_and_log(checkpoint):
    with serve(checkpoint, *OPTIONS, *NO_RESTARTS) as server, stream(server) as lines:
        pids = server.children
        os.kill(server.child("engine-0"), signal.SIGKILL)
        rest = list(lines)
        assert '"error"' in rest[-2]
        assert "killed by SIGKILL" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 1
        assert "engine-0 is gone: it was killed by SIGKILL" in server.log
        assert "it is given up" in server.log
        wait_until_gone(pids, END_SECONDS)


@pytest.mark.grid  # test_streams_survive.py kills the supervisor of more processes
def test_serve_killed_supervisor_all_processes_exit(checkpoint):
    with serve(checkpoint, *OPTIONS) as server:
        pids = server.children
        assert len(pids) == 2
        server.end(signal.SIGKILL)
        wait_until_gone(pids, END_SECONDS)


WORKERS = ("--tensor-parallel-size", "2")


def workers_of(server) -> list[int]:
    engine = server.child("engine-0")
    tasks = Path(f"/proc/{engine}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def test_serve_killed_worker_without_restart_is_named(checkpoint):
    with serve(checkpoint, *OPTIONS, *WORKERS, *NO_RESTARTS) as server, stream(server) as lines:
        pids = server.children + workers_of(server)
        os.kill(workers_of(server)[1], signal.SIGKILL)
        rest = list(lines)
        assert "worker engine-0/tp1-pp0: it was killed by SIGKILL" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 1
        assert "worker engine-0/tp1-pp0: it was killed by SIGKILL" in server.log
        assert "it is given up" in server.log
        wait_until_gone(pids, END_SECONDS)


@pytest.mark.grid  # the next test stops a server, test_streams_survive.py kills one
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_serve_stopped_workers_exit(checkpoint, how):
    with serve(checkpoint, *OPTIONS, *WORKERS) as server:
        pids = server.children + workers_of(server)
        assert len(pids) == 4
        server.end(how)
        wait_until_gone(pids, END_SECONDS)


@pytest.mark.grid  # test_streams_survive.py kills an engine too, and stops its worker
def test_serve_killed_engine_its_workers_exit(checkpoint):
    with serve(checkpoint, *OPTIONS, *WORKERS) as server:
        pids = [server.child("engine-0"), *workers_of(server)]
        assert len(pids) == 3
        os.kill(pids[0], signal.SIGKILL)
        wait_until_gone(pids, END_SECONDS)
        server.wait_for(r"engine-0\.1 serves again", READY_SECONDS)
        pids = [*server.children, *children_of(server.child("engine-0.1"))]
        assert len(pids) == 4
    assert server.process.returncode == 0
    wait_until_gone(pids, END_SECONDS)


@pytest.mark.grid  # test_fleet.py kills the engine too
def test_serve_killed_api_server_is_replaced_without_refusals(checkpoint):
    with serve(checkpoint, *OPTIONS) as server:
        os.kill(server.child("client-0"), signal.SIGKILL)
        # The listening socket is the supervisor's: who connects now waits in its backlog.
        request = LONG | {"model": "m", "max_tokens": 5, "stream": False}
        response = httpx.post(server.url + "/completions", json=request, timeout=60)
        assert response.status_code == 200, response.text
        assert "client-0 is gone: it was killed by SIGKILL" in server.log
        server.wait_for(r"client-0\.1 serves again", 10)
    assert server.process.returncode == 0


def test_serve_api_server_given_up_ends_instance_with_cause(checkpoint):
    with serve(checkpoint, *OPTIONS, *NO_RESTARTS) as server:
        pids = server.children
        os.kill(server.child("client-0"), signal.SIGKILL)
        assert server.wait() == 1
        assert "client-0 is gone: it was killed by SIGKILL" in server.log
        wait_until_gone(pids, END_SECONDS)


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.grid)])
def test_serve_stopped_drains_and_refuses_new_requests(checkpoint, how):
    with serve(checkpoint, *OPTIONS) as server, stream(server, max_tokens=1000) as lines:
        pids = server.children
        for pid in (server.process.pid, *pids, server.process.pid):  # as a terminal, `timeout` and systemd do
            os.kill(pid, how)
        server.wait_for("stopping", 10)
        with httpx.Client() as other:
            refused = other.post(server.url + "/completions", json=LONG | {"model": "m"})
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
        assert server.wait() == 0
        wait_until_gone(pids, END_SECONDS)


@pytest.fixture
def default_hangup():
    """Have SIGHUP end the processes that are started, even if the tests were started by nohup."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler)


def lose_terminal(server) -> None:
    """Signal as the system and the shell do, perhaps both of them: every process of the terminal's group."""
    for pid in [*server.children, server.process.pid] * 2:
        os.kill(pid, signal.SIGHUP)


@pytest.mark.grid  # the test of the drain timeout loses its terminal too
def test_serve_lost_terminal_drains(checkpoint, default_hangup):
    with serve(checkpoint, *OPTIONS) as server, stream(server, max_tokens=1000) as lines:
        lose_terminal(server)
        server.wait_for("stopping", 10)
        rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
        assert server.wait() == 0


def test_serve_second_signal_exits_at_once(checkpoint):
    with serve(checkpoint, *OPTIONS, "--shutdown-timeout", "600") as server, stream(server) as lines:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping", 10)
        time.sleep(2 * SAME_SIGNAL_SECONDS)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
        server.wait()


def test_serve_interrupted_start_is_quiet_and_leaves_nothing(checkpoint):
    """Ctrl-C in a terminal signals the whole group of processes."""
    command = [sys.executable, "-m", "eagleray.cli.main", "serve", checkpoint, "--port", "0", "--log-level", "debug"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        found = next(filter(None, (re.search(r"engine-0 is process (\d+)", line) for line in process.stderr)))
        os.killpg(process.pid, signal.SIGINT)
        log = process.stderr.read()
        assert process.wait(END_SECONDS) == INTERRUPTED
    assert "Traceback" not in log
    wait_until_gone([int(found[1])], END_SECONDS)


def test_serve_drain_timeout_aborts_running_requests(checkpoint, default_hangup):
    with serve(checkpoint, *OPTIONS, "--shutdown-timeout", "0.2") as server, stream(server) as lines:
        lose_terminal(server)
        rest = list(lines)
        assert '"finish_reason":"abort"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 0
        assert "Traceback" not in server.log


def refusal(*arguments: str) -> str:
    """Return the message of a server that cannot start; it must be one sentence, not a traceback."""
    run = subprocess.run(
        [sys.executable, "-m", "eagleray.cli.main", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert "starting engine-0.1" not in run.stderr
    return run.stderr.strip().splitlines()[-1]


def test_serve_port_in_use_is_refused(checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refusal(checkpoint, "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}" in message


def test_serve_file_size_limit_is_refused(checkpoint):
    program = f"ulimit -f 0; exec {sys.executable} -m eagleray.cli.main serve --port 0 {checkpoint}"
    run = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert "`ulimit -f`" in run.stderr.strip().splitlines()[-1]


def test_serve_missing_model_is_refused():
    assert "there is no such directory" in refusal("/no/such/model", "--port", "0")


def test_serve_truncated_weight_file_is_named(checkpoint, tmp_path):
    for file in Path(checkpoint).iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    message = refusal(str(tmp_path), "--port", "0")
    assert "model.safetensors" in message


@pytest.mark.grid  # test_llm.py gives a cache that is too small
def test_serve_cache_below_one_sequence_is_refused(checkpoint):
    message = refusal(checkpoint, "--port", "0", "--max-model-len", "4000", "--num-kv-blocks", "10")
    assert "160 tokens" in message
    assert "`max_model_len`" in message


def test_serve_unknown_option_is_refused(checkpoint):
    assert "--expert-parallel-size" in refusal(checkpoint, "--expert-parallel-size", "2")


@pytest.mark.parametrize(
    ("option", "size"),
    [("--tensor-parallel-size", "3"), ("--pipeline-parallel-size", "9")],
)
@pytest.mark.grid  # tests/unit/models/test_sharding.py has the sizes that are refused
def test_serve_parallel_size_that_does_not_divide_is_refused(checkpoint, option, size):
    assert option[2:].replace("-", "_") in refusal(checkpoint, "--port", "0", option, size)
