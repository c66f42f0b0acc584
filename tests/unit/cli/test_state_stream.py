from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.server
import io
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from typing import ClassVar

import msgspec
import pytest
from test_top_view import STATE

from eagleray.cli.main import main
from eagleray.cli.state_stream import StateStream
from eagleray.cli.top import run
from eagleray.errors import Unavailable, UserError

EVENT = b"data: " + msgspec.json.encode(STATE) + b"\n\n"
END = b"data: [DONE]\n\n"


class Handler(http.server.BaseHTTPRequestHandler):
    status: ClassVar[int] = 200
    kind: ClassVar[str] = "text/event-stream"
    answer: ClassVar[bytes] = b""
    """Whole answer in place of status, kind and body."""
    body: ClassVar[bytes] = EVENT + END
    stays: ClassVar[bool] = False
    """Whether the answer stays open until the server stops."""
    has_stopped: ClassVar[threading.Event]
    requests: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.requests.append((self.path, self.headers["Authorization"]))
        if self.answer:
            self.wfile.write(self.answer)
            return
        self.send_response(self.status)
        self.send_header("Content-Type", self.kind)
        self.end_headers()
        self.wfile.write(self.body)
        self.wfile.flush()
        if self.stays:
            self.has_stopped.wait(60)

    def log_message(self, *arguments: object) -> None: ...


@contextlib.contextmanager
def server(**answer: object) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Run a server with this answer. Yields its URL and the requests that it gets."""
    handler = type("ThisHandler", (Handler,), {"requests": [], "has_stopped": threading.Event(), **answer})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        running.daemon_threads = False  # the end of the block waits for the answers
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", handler.requests
        finally:
            handler.has_stopped.set()
            running.shutdown()
            thread.join()


def stream(url: str, key: str | None = None) -> StateStream:
    return StateStream(argparse.Namespace(url=url, api_key=key))


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("EAGLERAY_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("suffix", "path"), [("", "/dashboard/state"), ("/llm/v1/", "/llm/dashboard/state")])
def test_state_stream_reads_states_with_the_key(suffix, path):
    with server(body=EVENT * 3 + END) as (url, requests):
        assert list(stream(url + suffix, "secret")) == [STATE] * 3
    assert requests == [(path, "Bearer secret")]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ({"status": 401}, UserError, "needs an API key"),
        ({"status": 404}, UserError, "no eagleray server"),
        ({"status": 503, "body": b'{"error": {"message": "16 pages"}}'}, Unavailable, "16 pages"),
        ({"status": 500, "body": b"oops"}, UserError, r"refused \(500\): oops"),
        ({"kind": "text/html", "body": b"<h1>hello</h1>"}, UserError, "no eagleray server"),
        ({"body": b'data: {"other": 1}\n\n'}, UserError, "no eagleray server"),
    ],
)
def test_state_stream_error_says_what_is_wrong(answer, error, message):
    with server(**answer) as (url, _), pytest.raises(error, match=message):
        list(stream(url))


def test_state_stream_no_server_is_unavailable():
    with server() as (url, _):
        pass
    with pytest.raises(Unavailable, match="no server answers at http"):
        list(stream(url))


def test_state_stream_cut_off_is_unavailable():
    headers = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server(answer=headers + b"%x\r\n" % len(EVENT) + EVENT + b"\r\nfff\r\ndata") as (url, _):
        states = iter(stream(url))
        assert next(states) == STATE
        with pytest.raises(Unavailable, match=r"the answer of http\S+ broke off: its connection was closed"):
            next(states)


URLS = [
    "localhost:8000",
    "ftp://x",
    "http://",
    "http://a:99999",
    "http://a:b",
    "http://[::1",
    "http://a b",
    "http://.a",
]


@pytest.mark.parametrize("url", URLS)
def test_state_stream_invalid_url_is_refused(url):
    with pytest.raises(UserError, match="expected http://HOST:PORT"):
        stream(url)


def test_state_stream_key_is_sent_in_utf8_and_refused_with_a_line_break():
    with server() as (url, requests):
        list(stream(url, "ключ"))
        with pytest.raises(UserError, match="the API key has a line break"):
            stream(url, "a\nb")
    assert requests[0][1].encode("latin-1").decode() == "Bearer ключ"


def test_top_into_a_pipe_prints_one_snapshot(capsys):
    newer = msgspec.structs.replace(STATE, model="newer", experts=None)
    with server(body=EVENT + b"data: " + msgspec.json.encode(newer) + b"\n\n", stays=True) as (url, _):
        run(argparse.Namespace(url=url, api_key=None))
    text = capsys.readouterr().out
    assert text.startswith("eagleray newer ")
    assert "EXPERTS BY LAYER" in text
    assert "\x1b" not in text


def test_top_forgets_the_experts_of_another_instance(capsys):
    other = msgspec.structs.replace(STATE, instance="other", experts=None)
    with server(body=EVENT + b"data: " + msgspec.json.encode(other) + b"\n\n", stays=threading.Event()) as (url, _):
        run(argparse.Namespace(url=url, api_key=None))
    assert "EXPERTS BY LAYER" not in capsys.readouterr().out


def test_top_on_a_terminal_of_another_encoding_prints_question_marks(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    with server(body=EVENT) as (url, _):
        assert main(["top", "--url", url]) == 0
    output.flush()
    assert b"0.50 ?????" in output.buffer.getvalue()


def test_top_without_rich_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install rich"):
        run(argparse.Namespace(url="http://localhost", api_key=None))


def _as_in_the_background() -> None:
    """Make the terminal the controlling one, so that Ctrl-C sends SIGINT, and ignore SIGINT."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("key", [b"q", b"\x03", signal.SIGTERM])
def test_top_in_a_terminal_ends_with_a_key_or_a_signal(key):
    leader, follower = pty.openpty()
    with server(stays=True) as (url, _):
        command = [sys.executable, "-m", "eagleray.cli.main", "top", "--url", url]
        process = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
            start_new_session=True,
            preexec_fn=_as_in_the_background,
        )
        os.close(follower)
        shown = b""
        while b"engine-0" not in shown:
            shown += os.read(leader, 65536)
        if isinstance(key, bytes):
            os.write(leader, key)
        else:
            process.send_signal(key)
        with contextlib.suppress(OSError):  # the terminal is closed
            while data := os.read(leader, 65536):
                shown += data
        _, errors = process.communicate(timeout=30)
    os.close(leader)
    assert (process.returncode, errors) == (0, b"")
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
