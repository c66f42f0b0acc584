"""Files of batches at URLs, by the file system of fsspec that is in memory."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from eagleray.batch import locations
from eagleray.batch.locations import local_output, opened_input
from eagleray.errors import ConfigError

fsspec = pytest.importorskip("fsspec")
URL = "memory://batches/out.jsonl"


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(locations, "JOURNALS", tmp_path / "journals")
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/batches", recursive=True) if system.exists("/batches") else None


def test_input_at_a_url_is_read(memory):
    memory.pipe("/batches/in.jsonl", b"one\ntwo\n")
    with opened_input("memory://batches/in.jsonl") as rows:
        assert list(rows) == [b"one\n", b"two\n"]


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("/no/such/file", "No such file or directory"),
        ("memory://batches/none.jsonl", "there is no such file or directory"),
        ("none://x", "none:// is read by fsspec, and Protocol not known: none: install it with"),
        ("http://127.0.0.1:1/x", "its server cannot be reached"),
    ],
)
def test_input_that_cannot_be_read_is_named_with_the_reason(location, problem):
    with pytest.raises(ConfigError) as caught, opened_input(location):
        pass
    assert str(caught.value).startswith(f"--input-file {location!r}: {problem}")


@pytest.fixture
def http():
    """A server that keeps the bodies of PUT by path; GET and HEAD answer them, or 403."""
    kept: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_PUT(self) -> None:
            kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            body = kept.get(self.path, b"")
            self.send_response(200 if self.path in kept else 403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", kept
        server.shutdown()
        thread.join()


def test_output_by_http_is_put(http):
    url, kept = http
    with local_output(f"{url}/out") as path:
        assert kept == {"/out": b""}
        path.write_text("one\n")
    assert kept == {"/out": b"one\n"}


def test_input_by_http_is_read_in_lines_of_a_limited_length(http):
    url, kept = http
    kept["/in"] = b"one\nlonger\n"
    with opened_input(f"{url}/in") as rows:
        assert [rows.readline(5) for _ in range(4)] == [b"one\n", b"longe", b"r\n", b""]


def test_input_that_breaks_off_is_named(http, monkeypatch):
    url, kept = http
    kept["/in"] = b"one\n"
    with opened_input(f"{url}/in") as rows:
        monkeypatch.setattr(type(rows.raw._file), "readinto", refuse)
        with pytest.raises(ConfigError, match=rf"--input-file '{url}/in': access is denied"):
            rows.readline()


def test_input_that_a_server_refuses_names_its_status(http):
    with pytest.raises(ConfigError, match="its server answered with status 403"), opened_input(f"{http[0]}/in"):
        pass


def test_output_at_a_url_is_copied_at_the_end_and_continued(memory):
    for line in ("one\n", "two\n"):
        with local_output(URL) as path, path.open("a") as file:
            file.write(line)
        assert list(path.parent.iterdir()) == []
    assert memory.cat("/batches/out.jsonl") == b"one\ntwo\n"


def test_output_of_a_batch_that_fails_is_copied_too(memory):
    with pytest.raises(KeyboardInterrupt), local_output(URL) as path:
        path.write_text("one\n")
        raise KeyboardInterrupt
    assert memory.cat("/batches/out.jsonl") == b"one\n"


def test_output_of_a_killed_batch_is_continued_from_the_local_file(memory):
    with local_output(URL) as path:
        path.write_text("one\n")
        text = path.read_text()
    path.write_text(text + "two\n")  # what a process that was killed has left
    with local_output(URL) as path:
        assert path.read_text() == "one\ntwo\n"


def refuse(*arguments: object) -> None:
    raise PermissionError("not yours")


def test_output_that_cannot_be_copied_stays_and_is_named(memory, monkeypatch):
    expected = r"access is denied \(PermissionError: not yours\): .*; the answers are in"
    with pytest.raises(ConfigError, match=expected), local_output(URL) as path:
        path.write_text("one\n")
        monkeypatch.setattr(type(memory), "put_file", refuse)
    assert path.read_text() == "one\n"


def test_output_that_cannot_be_written_is_refused_before_rows_are_answered(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(type(memory), "put_file", refuse)
    with pytest.raises(ConfigError, match=r"--output-file .*access is denied"), local_output(URL):
        raise AssertionError
    assert list((tmp_path / "journals").iterdir()) == []


def test_output_of_a_running_batch_is_refused_and_left(memory):
    with local_output(URL) as path:
        with pytest.raises(ConfigError, match="another batch is writing it"), local_output(URL):
            pass
        path.write_text("one\n")
    assert memory.cat("/batches/out.jsonl") == b"one\n"


def test_output_that_is_fetched_in_part_is_fetched_again(memory, monkeypatch):
    memory.pipe("/batches/out.jsonl", b"one\ntwo\n")

    def fetch_half(system: object, remote: str, local: str) -> None:
        Path(local).write_bytes(b"one\n")
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(type(memory), "get_file", fetch_half)
        with pytest.raises(KeyboardInterrupt), local_output(URL):
            pass
    with local_output(URL) as path:
        assert path.read_bytes() == b"one\ntwo\n"


def test_output_journals_that_cannot_be_made_are_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(locations, "JOURNALS", tmp_path / "file" / "journals")
    with pytest.raises(ConfigError, match=r"answers are collected in .*Not a directory"), local_output(URL):
        pass


def test_output_lock_that_cannot_be_opened_is_no_other_batch(tmp_path):
    with local_output(URL):
        [lock] = (tmp_path / "journals").glob("*.lock")
    lock.mkdir()
    with pytest.raises(ConfigError, match=r"nothing can be written there: Is a directory"), local_output(URL):
        pass
