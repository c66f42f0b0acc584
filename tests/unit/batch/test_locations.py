"""Files of batches at URLs, by the file system of fsspec that is in memory."""

from __future__ import annotations

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


@pytest.mark.parametrize("location", ["memory://batches/none.jsonl", "none://x", "/no/such/file"])
def test_input_that_cannot_be_read_is_named(location):
    with pytest.raises(ConfigError, match=location), opened_input(location):
        pass


def test_output_at_a_url_is_copied_at_the_end_and_continued(memory):
    for line in ("one\n", "two\n"):
        with local_output(URL) as path, path.open("a") as file:
            file.write(line)
        assert not path.exists()
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


def test_output_that_cannot_be_copied_stays_and_is_named(memory, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(type(memory), "put_file", refuse)
    with pytest.raises(ConfigError, match="not yours; the answers are in"), local_output(URL) as path:
        path.write_text("one\n")
    assert path.read_text() == "one\n"
