"""`eagleray scale` and `eagleray restart --rolling` against a scripted server."""

from __future__ import annotations

import contextlib
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from eagleray.cli import fleet_operation
from eagleray.cli.main import main

IDLE = {
    "operation_id": None,
    "phase": "idle",
    "participating_ranks": [0],
    "active_api_server_count": 2,
    "waiting_for": None,
    "last_error": None,
    "seconds": None,
}
STARTING = IDLE | {"operation_id": "mine", "phase": "preparing", "waiting_for": "engine-1 must start", "seconds": 0.1}
ADMITTED = STARTING | {"phase": "committing", "waiting_for": "client-1 must exit", "participating_ranks": [0, 1]}
COMPLETED = ADMITTED | {"phase": "completed", "waiting_for": None, "seconds": 1.46, "active_api_server_count": 1}
FAILED = STARTING | {"phase": "failed", "waiting_for": None, "last_error": "the cache is too small", "seconds": 3.0}
REFUSED = {"error": {"message": "there is no engine 7", "type": "", "param": "remove_ranks", "code": None}}


class Server:
    """Answers each request with the next of `answers`, which are statuses and bodies; the last one stays."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, str, Any]] = []
        self.keys: set[str | None] = set()
        self.url = ""


@contextlib.contextmanager
def running(*answers: tuple[int, Any]) -> Iterator[Server]:
    script = Server(*answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            script.requests.append((self.command, self.path, json.loads(body) if body else None))
            script.keys.add(self.headers["Authorization"])
            status, answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            script.url = f"http://127.0.0.1:{server.server_port}"
            yield script
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def poll_often(monkeypatch):
    monkeypatch.setattr(fleet_operation, "POLL_SECONDS", (0.01, 0.01))


def test_scale_prints_the_progress_and_the_outcome(capsys):
    with running((202, STARTING), (200, STARTING), (503, REFUSED), (200, ADMITTED), (200, COMPLETED)) as server:
        line = ["scale", "--url", server.url + "/v1", "-dp", "2", "--remove-ranks", "1,3", "--api-server-count", "1"]
        assert main([*line, "--drain-timeout", "2.5", "--operation-id", "mine/1"]) == 0
    method, path, body = server.requests[0]
    assert (method, path) == ("POST", "/scale")
    assert body == {
        "data_parallel_size": 2,
        "remove_ranks": [1, 3],
        "api_server_count": 1,
        "drain_timeout": 2.5,
        "operation_id": "mine/1",
        "wait": False,
    }
    assert {request[:2] for request in server.requests[1:]} == {("GET", "/scale?operation_id=mine%2F1")}
    assert capsys.readouterr().out.splitlines() == [
        "preparing: engine-1 must start",
        "committing: client-1 must exit",
        "completed in 1.5 s: the engines are 0, 1, with 1 API server",
    ]


def test_restart_names_its_operation_at_random(capsys):
    with running((202, COMPLETED)) as server:
        for _ in range(2):
            assert main(["restart", "--rolling", "--url", server.url, "--ranks", "1"]) == 0
    bodies = [body for _, path, body in server.requests if path == "/restart"]
    assert [body["ranks"] for body in bodies] == [[1], [1]]
    assert len({body["operation_id"] for body in bodies}) == 2


def test_restart_sends_the_options_that_are_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    with running((202, COMPLETED), (202, COMPLETED)) as server:
        line = ["restart", "--rolling", "--url", server.url]
        assert main([*line, "--model", "new", "--max-num-seqs", "64", "--no-enable-prefix-caching"]) == 0
        assert main([*line, "--model", "owner/model"]) == 0
    options = {"model": str(tmp_path / "new"), "max_num_seqs": "64", "enable_prefix_caching": False}
    assert [body["options"] for _, _, body in server.requests] == [options, {"model": "owner/model"}]


def test_scale_failed_operation_is_exit_code_1(capsys):
    with running((202, STARTING), (200, FAILED)) as server:
        assert main(["scale", "--url", server.url, "-dp", "2"]) == 1
    assert "failed after 3.0 s: the cache is too small; the engines are 0, with 2 API" in capsys.readouterr().out


def test_scale_no_wait_ends_when_the_operation_has_begun(capsys):
    with running((202, STARTING)) as server:
        assert main(["scale", "--url", server.url, "-dp", "2", "--no-wait"]) == 0
    assert len(server.requests) == 1
    assert "eagleray scale --status --operation-id mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "printed"),
    [
        (IDLE, "there was no operation yet: the engines are 0, with 2 API servers"),
        (STARTING, "preparing: engine-1 must start"),
        (COMPLETED, "completed in 1.5 s: the engines are 0, 1, with 1 API server"),
    ],
)
def test_scale_status_changes_nothing(capsys, status, printed):
    with running((200, status)) as server:
        assert main(["scale", "--url", server.url, "--status"]) == 0
    assert server.requests == [("GET", "/scale", None)]
    assert capsys.readouterr().out.strip() == printed


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ((400, REFUSED), 2, "refused (400): there is no engine 7"),
        ((401, REFUSED), 2, "give the key by --api-key"),
        ((404, REFUSED), 2, "refused (404)"),
        ((503, REFUSED), 1, "there is no engine 7"),
        ((200, b"<html>"), 2, "is no eagleray server"),
        ((200, {"phase": "completed"}), 2, "is no eagleray server"),
    ],
)
def test_scale_refusal_is_a_sentence(capsys, answer, code, said):
    with running(answer) as server:
        assert main(["scale", "--url", server.url, "-dp", "2"]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("scale", "name a number to scale to"),
        ("scale -dp 2 --status", "--status changes nothing"),
        ("scale -dp two", "--data-parallel-size"),
        ("scale --remove-ranks 1,a", "--remove-ranks"),
        ("restart", "--rolling"),
    ],
)
def test_scale_wrong_line_sends_nothing(capsys, line, said):
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], "Bearer admin"), (["--api-key", "given"], "Bearer given")],
)
def test_scale_sends_the_admin_key(monkeypatch, flags, expected):
    monkeypatch.setenv("EAGLERAY_ADMIN_API_KEY", "admin,other")
    monkeypatch.setenv("EAGLERAY_API_KEY", "user")
    with running((200, IDLE)) as server:
        main(["scale", "--url", server.url, "--status", *flags])
    assert server.keys == {expected}


def test_scale_imports_neither_torch_nor_ray():
    program = "import sys; from eagleray.cli import scale, restart; print({'torch', 'ray'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
