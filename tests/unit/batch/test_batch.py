"""The rows of a batch: answered once each, by an application in memory."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
from codecs import BOM_UTF8
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from eagleray.batch.output_file import OutputFile
from eagleray.batch.run import Batch
from eagleray.errors import ConfigError
from eagleray.progress import Progress

LIMIT = 1000


class Server:
    """An application that answers the prompt in upper case, and counts its requests."""

    def __init__(self, *, busy: int = 0) -> None:
        self.prompts: list[str] = []
        self.most_running = self._running = 0
        self._busy = busy
        self.app = Starlette(routes=[Route("/v1/completions", self.complete, methods=["POST"])])

    async def complete(self, request: Request) -> JSONResponse:
        prompt = (await request.json())["prompt"]
        if self._busy:
            self._busy -= 1
            return JSONResponse({"error": {"message": "busy", "code": None}}, 429)
        self.prompts.append(prompt)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        await asyncio.sleep(0)
        self._running -= 1
        if prompt == "bad":
            return JSONResponse({"error": {"message": "`prompt`: bad", "code": "invalid"}}, 400)
        return JSONResponse({"text": prompt.upper(), "usage": {"prompt_tokens": 1, "completion_tokens": 2}})


def row(custom_id: str, prompt: str, **changes: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}, **changes}


def run(rows: list[object] | bytes, path, server: Server | None = None, *, concurrency: int = 4) -> Progress:
    data = rows if isinstance(rows, bytes) else b"".join(json.dumps(one).encode() + b"\n" for one in rows)
    progress = Progress("rows", is_shown=False)
    output = OutputFile.open(path)
    try:
        batch = Batch((server or Server()).app, output, max_row_bytes=LIMIT, progress=progress)
        asyncio.run(batch.run(io.BytesIO(data), concurrency))
    finally:
        output.close()
    return progress


def lines(path) -> dict[str, dict]:
    """Return the lines of an output by their ids, which must be different."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {one["id"]: one for one in found}
    assert len(by_id) == len(found)
    return by_id


def test_batch_every_row_has_its_answer(tmp_path):
    server = Server()
    progress = run([row(f"r{n}", f"p{n}") for n in range(20)] + [row("x", "bad")], tmp_path / "out", server)
    answers = {one["custom_id"]: one for one in lines(tmp_path / "out").values()}
    for n in range(20):
        answer = answers[f"r{n}"]
        assert (answer["id"], answer["error"]) == (f"batch_req_{n + 1}", None)
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["text"] == f"P{n}"
    failed = answers["x"]
    assert failed["error"] == {"code": "invalid", "message": "`prompt`: bad"}
    assert failed["response"]["status_code"] == 400
    assert 1 < server.most_running <= 4
    assert (progress.num_finished, progress.num_failed) == (21, 1)
    assert (progress.prompt_tokens, progress.output_tokens) == (20, 40)


WRONG_ROWS = {
    b"nope": "not valid JSON",
    b"[1]": "Expected `object`",
    b'{"custom_id": "a", "body": {}}': "missing required field `url`",
    json.dumps(row("", "x")).encode(): "`custom_id` must have",
    json.dumps(row("a", "x", method="GET")).encode(): "`method` must be POST",
    json.dumps(row("a", "x", url="/pause")).encode(): "`url` must be one of /v1/chat/completions",
    json.dumps(row("a", "x", body={"stream": True})).encode(): "`stream` must be false",
    json.dumps(row("a", "x" * LIMIT)).encode(): f"more than {LIMIT} bytes",
    json.dumps(row("a", "x" * 5 * LIMIT)).encode(): f"more than {LIMIT} bytes",
    b'{"custom_id": "\xff"}': "not valid JSON",
    b'{"custom_id": "a", "url": "/v1/completions", "body": {"a": ' + b"[" * 900: "not valid JSON",
}


@pytest.mark.parametrize("line", WRONG_ROWS, ids=lambda line: line[:40].decode(errors="replace"))
def test_batch_wrong_row_is_an_error_of_that_row(tmp_path, line):
    good = json.dumps(row("good", "p")).encode()
    run(b"\n".join([line, b"", good]), tmp_path / "out")
    answers = lines(tmp_path / "out")
    assert set(answers) == {"batch_req_1", "batch_req_3"}
    assert answers["batch_req_1"]["response"] is None
    assert WRONG_ROWS[line] in answers["batch_req_1"]["error"]["message"]
    assert answers["batch_req_3"]["response"]["body"]["text"] == "P"


def test_batch_wrong_row_keeps_its_custom_id(tmp_path):
    run([row("mine", "x", url="/pause")], tmp_path / "out")
    assert lines(tmp_path / "out")["batch_req_1"]["custom_id"] == "mine"


def test_batch_second_row_of_an_id_is_an_error_that_names_the_first(tmp_path):
    run([row("a", "p"), row("a", "q")], tmp_path / "out")
    answers = lines(tmp_path / "out")
    assert answers["batch_req_1"]["response"]["body"]["text"] == "P"
    assert answers["batch_req_2"]["error"]["code"] == "duplicate_custom_id"
    assert "line 1" in answers["batch_req_2"]["error"]["message"]


ROWS = [row("a", "p"), row("b", "bad"), row("a", "again"), row("c", "x", url="/pause"), row("d", "q")]


@pytest.mark.parametrize("kept", range(len(ROWS) + 1))
@pytest.mark.parametrize("cut", [0, 1, 15])
def test_batch_started_again_answers_the_other_rows_only(tmp_path, kept, cut):
    path = tmp_path / "out"
    run(ROWS, path)
    whole = path.read_bytes().splitlines(keepends=True)
    expected = lines(path)
    rest = whole[kept][: len(whole[kept]) * cut // 16] if kept < len(whole) else b""
    path.write_bytes(b"".join(whole[:kept]) + rest)
    answered = {json.loads(line)["id"] for line in whole[:kept]}
    server = Server()
    progress = run(ROWS, path, server)
    assert lines(path) == expected
    assert progress.num_skipped == kept
    sent = {"batch_req_1": "p", "batch_req_2": "bad", "batch_req_5": "q"}
    assert sorted(server.prompts) == sorted(prompt for name, prompt in sent.items() if name not in answered)


def test_batch_input_in_another_order_sends_no_row_twice(tmp_path):
    run([row("a", "p"), row("b", "q")], tmp_path / "out")
    server = Server()
    run([row("b", "q"), row("a", "p")], tmp_path / "out", server)
    assert server.prompts == []


def test_batch_busy_engines_the_row_is_sent_again(tmp_path, monkeypatch):
    monkeypatch.setattr("eagleray.batch.run.RETRY_SECONDS", 0.0)
    run([row("a", "p")], tmp_path / "out", Server(busy=3))
    assert lines(tmp_path / "out")["batch_req_1"]["error"] is None


def test_batch_engines_stay_busy_the_row_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("eagleray.batch.run.RETRY_SECONDS", 0.0)
    run([row("a", "p")], tmp_path / "out", Server(busy=99))
    answer = lines(tmp_path / "out")["batch_req_1"]
    assert (answer["response"]["status_code"], answer["error"]["message"]) == (429, "busy")


def test_batch_full_disk_leaves_whole_lines_and_says_what_to_do(tmp_path, monkeypatch):
    write, num_writes = os.write, 0

    def write_until_full(descriptor: int, data: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes >= 3:
            write(descriptor, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_until_full)
        with pytest.raises(ConfigError, match="No space left on device: make room, and start again"):
            run([row(f"r{n}", "p") for n in range(50)], tmp_path / "out")
    assert len(lines(tmp_path / "out")) == 2
    run([row(f"r{n}", "p") for n in range(50)], tmp_path / "out")
    assert len(lines(tmp_path / "out")) == 50


@pytest.mark.parametrize("content", ["a text\n", "a text", '{"id": 3}\n', '{"custom_id": "a"}\n'])
def test_output_file_with_other_content_is_refused_and_left(tmp_path, content):
    path = tmp_path / "out"
    path.write_text(content)
    with pytest.raises(ConfigError, match="name another file"):
        OutputFile.open(path)
    assert path.read_text() == content


def test_output_file_that_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            OutputFile.open(path)


def test_output_file_of_another_kind_is_not_read(tmp_path):
    path = tmp_path / "out"
    with path.open("wb") as file:
        file.truncate(2**40)  # a line that no memory holds
    with pytest.raises(ConfigError, match="it is not a batch's output"):
        OutputFile.open(path)


def test_batch_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "out"
    run(BOM_UTF8 + json.dumps(row("a", "p")).encode(), path)
    assert lines(path)["batch_req_1"]["error"] is None


def test_output_file_of_a_running_batch_is_refused(tmp_path):
    output = OutputFile.open(tmp_path / "out")
    with pytest.raises(ConfigError, match="another batch is writing it"):
        OutputFile.open(tmp_path / "out")
    output.close()
    OutputFile.open(tmp_path / "out").close()
