"""The driver of `make compat`, with clients and a runner in memory."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import compat
import pytest
from chaos_server import ChaosFailed
from compat import BEGIN, END, CompatFailed, LocalRunner, read_checks, try_client, try_clients, update_table
from compat_clients import CLIENTS, CompatClient

CLIENT = CompatClient("first", ("one==1.2", "two==3"), "First")
SECOND = replace(CLIENT, name="second", title="Second")
DOCUMENT = f"before\n{BEGIN}{END}after\n"


def line(name: str, is_ok: bool = True, detail: str = "") -> str:
    """Return the line that a script prints for a check."""
    return json.dumps({"name": name, "ok": is_ok, "detail": detail}) + "\n"


class FakeRunner:
    """Answers for each client with an output, or raises an error in place of installing or running it."""

    def __init__(self, output="", *, install_error=None, run_error=None):
        self._output, self._install_error, self._run_error = output, install_error, run_error

    def install(self, client):
        if self._install_error:
            raise self._install_error

    def run(self, client):
        if self._run_error:
            raise self._run_error
        return self._output


def test_try_client_all_checks_pass_has_no_failures():
    result = try_client(CLIENT, FakeRunner(line("chat") + "noise of the client\n" + line("stream")))
    assert (result.passed, result.failures()) == (2, [])
    assert result.row() == "| First | 1.2 | 2 of 2 | – |"


def test_try_client_failure_is_in_its_row():
    result = try_client(CLIENT, FakeRunner(line("chat", False, "no answer")))
    assert result.failures() == ["chat: no answer"]
    assert result.row() == "| First | 1.2 | 0 of 1 | chat |"


def test_try_client_not_installed_is_a_row():
    result = try_client(CLIENT, FakeRunner(install_error=CompatFailed("exit code 1: no such | version")))
    assert result.row() == "| First | 1.2 | 0 of 0 | not installed: exit code 1: no such / version |"
    assert len(result.failures()) == 1


def test_try_client_that_is_cut_off_keeps_its_checks():
    error = CompatFailed("still running after 900 s", line("chat"))
    result = try_client(CLIENT, FakeRunner(run_error=error))
    assert result.passed == 1
    assert result.failures() == ["did not run to its end: still running after 900 s"]


def test_try_client_without_checks_has_failed():
    assert try_client(CLIENT, FakeRunner("nothing\n")).failures() == ["did not report a check"]


def test_try_clients_goes_on_after_a_failure():
    said = []
    results = try_clients([CLIENT, SECOND], FakeRunner(install_error=CompatFailed("no index")), said.append)
    assert [result.client for result in results] == [CLIENT, SECOND]
    assert "second: FAILED not installed: no index" in said


def test_read_checks_keeps_the_order():
    of_node = line("a").replace(": ", ":").replace(", ", ",")
    assert [check.name for check in read_checks(line("b") + of_node)] == ["b", "a"]


def test_update_table_keeps_rows_of_clients_that_were_not_tried():
    clients = [CLIENT, SECOND]
    both = update_table(DOCUMENT, [try_client(c, FakeRunner(line("chat"))) for c in clients], clients)
    again = update_table(both, [try_client(SECOND, FakeRunner(line("chat", False)))], clients)
    assert [row for row in again.splitlines() if row.startswith(("| First", "| Second"))] == [
        "| First | 1.2 | 1 of 1 | – |",
        "| Second | 1.2 | 0 of 1 | chat |",
    ]
    assert again.startswith("before\n") and again.endswith("after\n")


def test_update_table_drops_rows_of_clients_that_are_gone():
    both = update_table(DOCUMENT, [try_client(c, FakeRunner(line("chat"))) for c in (CLIENT, SECOND)], [CLIENT, SECOND])
    assert "Second" not in update_table(both, [], [CLIENT])


def test_update_table_without_markers_raises():
    with pytest.raises(ValueError, match="no table"):
        update_table("text", [])


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_clients_have_a_script_and_pins(client):
    script = compat.SCRIPTS / f"{client.name}{'.mjs' if client.is_node else '.py'}"
    assert script.exists()
    assert all(("@" if client.is_node else "==") in pin for pin in (client.pins or client.bare_pins)[:1])


def test_clients_have_names_and_titles_of_their_own():
    assert len({client.name for client in CLIENTS}) == len({client.title for client in CLIENTS}) == len(CLIENTS)


def test_document_has_a_place_for_the_table():
    assert update_table(compat.DOCUMENT.read_text("utf-8"), [])


def test_main_pooling_server_that_fails_keeps_other_results(tmp_path, monkeypatch, capsys):
    document = tmp_path / "compatibility.md"
    document.write_text(DOCUMENT)

    @contextmanager
    def serving(*options):
        if options:
            raise ChaosFailed("no server")
        yield "url", "model"

    monkeypatch.setattr(compat, "serving", serving)
    monkeypatch.setattr(compat, "DOCUMENT", document)
    monkeypatch.setattr(compat, "LocalRunner", lambda *args, **fields: FakeRunner(line("chat")))
    monkeypatch.setattr(compat, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["compat.py", "--only", "openai_python", "--only", "openai_embeddings"])
    monkeypatch.setenv("EAGLERAY_COMPAT_DIR", str(tmp_path))
    assert compat.main() == 1
    (row,) = [row for row in document.read_text().splitlines() if "1 of 1" in row]
    assert row.startswith("| openai (Python) |")
    assert "no server" in capsys.readouterr().err


def test_local_runner_program_that_fails_keeps_output_and_last_error(tmp_path):
    runner = LocalRunner(tmp_path, tmp_path / "log", url="", model="")
    with pytest.raises(CompatFailed, match=r"^exit code 3: the reason$") as raised:
        runner._execute(["sh", "-c", "echo out; echo the reason >&2; exit 3"], Path(tmp_path), 60.0)
    assert raised.value.output == "out\n"


def test_local_runner_program_beyond_its_deadline_is_ended(tmp_path):
    runner = LocalRunner(tmp_path, tmp_path / "log", url="", model="")
    with pytest.raises(CompatFailed, match="still running after 0 s"):
        runner._execute(["sleep", "60"], Path(tmp_path), 0.1)


def test_local_runner_program_that_is_missing_is_a_failure(tmp_path):
    runner = LocalRunner(tmp_path, tmp_path / "log", url="", model="")
    with pytest.raises(CompatFailed, match="No such file"):
        runner._execute(["no-such-program-here"], Path(tmp_path), 60.0)


def test_local_runner_install_of_the_same_pins_is_not_repeated(tmp_path):
    runner = LocalRunner(tmp_path, tmp_path / "log", url="", model="")
    place = runner._place(CLIENT)
    place.mkdir()
    (place / ".ready").write_text(json.dumps([*CLIENT.pins, "bare"]))
    (place / "kept").touch()
    runner.install(CLIENT)
    assert (place / "kept").exists()
