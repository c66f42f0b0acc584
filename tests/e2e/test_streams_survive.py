"""Streams continue with unchanged text, whichever process of a server is killed or stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from checkpoints import make_checkpoint
from grammar_walks import schema_errors
from serving import END_SECONDS, ServerProcess, serve, wait_until_gone

SECONDS = 90.0
TOKENS = 400
REGEX = "([a-z]{3,8} ){30}[a-z]{3,8}\\."
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "size": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["name", "size"],
        "additionalProperties": False,
    },
    "minItems": 9,
    "maxItems": 9,
}
CONSTRAINED = [
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"structured_outputs": {"regex": REGEX}},
]
REQUESTS = [
    {"prompt": "The quick brown fox", "temperature": 0},
    {"prompt": "def main():", "temperature": 0.9, "seed": 7},
    {"prompt": "Hello", "temperature": 1.0, "seed": 8, "presence_penalty": 0.3},
    {"prompt": "Grüße aus Köln", "temperature": 0, "frequency_penalty": 0.2},
    *({"prompt": "Hello", "temperature": 1.0, "seed": 9, "ignore_eos": False, **one} for one in CONSTRAINED),
]
OPTIONS = ("--served-model-name", "m", "--log-level", "debug", "--max-model-len", "2000", "--heartbeat-timeout", "2")
TWO_ENGINES = ("--data-parallel-size", "2")
WORKERS = ("--executor", "processes")
LAYOUTS = {
    "tp": ("--tensor-parallel-size", "2"),
    "pp": ("--pipeline-parallel-size", "2"),
    "dp": TWO_ENGINES,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", max_position_embeddings=4000))


@pytest.fixture(scope="module")
def undisturbed(checkpoint):
    with serve(checkpoint, *OPTIONS) as server:
        answers = streams(server)
    check_constrained(answers)
    return answers


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="er-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert list(Path(directory).iterdir()) == []


class Broken(Exception):
    """Raised when the connection ends before the stream."""


class Answer(NamedTuple):
    text: str
    token_ids: list[int]


def check_constrained(answers: list[Answer | None]) -> None:
    """Check that the answers of the constrained requests are complete and follow their constraints."""
    in_json, in_words = answers[len(REQUESTS) - len(CONSTRAINED) : len(REQUESTS)]
    assert schema_errors(SCHEMA, in_json.text) == []
    assert re.fullmatch(REGEX, in_words.text)


def stream(server: ServerProcess, request: dict, begun: threading.Event) -> Answer:
    """Return the whole answer of a stream. `begun` is set at its first piece."""
    body = {"model": "m", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True, **request}
    answer = Answer("", [])
    with (
        contextlib.ExitStack() as stack,
        httpx.stream("POST", server.url + "/completions", json=body, timeout=SECONDS) as response,
    ):
        stack.callback(begun.set)  # in every case, so that the waiting thread gets to the error
        assert response.status_code == 200, response.read()
        try:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return answer
                if line:
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        answer = Answer(answer.text + choice["text"], answer.token_ids + choice["token_ids"])
                    begun.set()
        except httpx.TransportError as error:
            raise Broken from error
    raise Broken


def streams(server: ServerProcess, disturb=lambda: None) -> list[Answer | None]:
    """Return the answers to all requests, sent twice at the same time; None for a broken connection.

    `disturb` is called when all streams have begun.
    """
    requests = REQUESTS * 2
    begun = [threading.Event() for _ in requests]

    def one(request: dict, begun: threading.Event) -> Answer | None:
        try:
            return stream(server, request, begun)
        except Broken:
            return None

    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(map(pool.submit, [one] * len(requests), requests, begun))
        assert all(event.wait(SECONDS) for event in begun)
        disturb()
        return [answer.result() for answer in answers]


def workers_of(engine: int) -> list[int]:
    tasks = Path(f"/proc/{engine}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.grid), signal.SIGSTOP])
def test_streams_with_one_of_two_engines_lost_are_unchanged(checkpoint, undisturbed, how):
    with serve(checkpoint, *OPTIONS, *TWO_ENGINES) as server:
        engine = server.child("engine-0")
        assert streams(server, lambda: os.kill(engine, how)) == undisturbed
        server.wait_for(r"engine-0 is gone: it was (killed by SIGKILL|silent for \d+ s).*; starting engine-0\.1", 10)
        server.wait_for(r"engine-0\.1 serves again after \d+\.\d s", SECONDS)
        wait_until_gone([engine], END_SECONDS)
        assert streams(server) == undisturbed
    assert server.process.returncode == 0, server.log


@pytest.mark.grid  # test_llm.py kills a worker too
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_with_worker_lost_are_unchanged(checkpoint, undisturbed, how):
    with serve(checkpoint, *OPTIONS, *WORKERS) as server:
        engine = server.child("engine-0")
        (worker,) = workers_of(engine)
        assert streams(server, lambda: os.kill(worker, how)) == undisturbed
        server.wait_for(r"engine-0 is gone: .*worker engine-0/tp0-pp0.*; starting engine-0\.1", 10)
        wait_until_gone([engine, worker], END_SECONDS)
    assert server.process.returncode == 0, server.log


def test_streams_with_engine_killed_and_worker_stopped_are_unchanged(checkpoint, undisturbed):
    """No process is left that could kill the worker, so the stopped worker has to exit by itself."""
    with serve(checkpoint, *OPTIONS, *WORKERS) as server:
        engine = server.child("engine-0")
        (worker,) = workers_of(engine)

        def disturb():
            os.kill(worker, signal.SIGSTOP)
            os.kill(engine, signal.SIGKILL)

        assert streams(server, disturb) == undisturbed
        wait_until_gone([engine, worker], END_SECONDS)


@pytest.mark.grid  # test_fleet.py kills one of two too
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_with_one_of_two_api_servers_lost_break_only_there(checkpoint, undisturbed, how):
    """The connections of the lost server break; those of the other, and all new ones, do not."""
    with serve(checkpoint, *OPTIONS, "--api-server-count", "2") as server:
        api_server = server.child("client-0")
        answers = streams(server, lambda: os.kill(api_server, how))
        assert all(answer in (None, whole) for answer, whole in zip(answers, undisturbed, strict=True))
        server.wait_for(r"client-0 is gone: .*; starting client-0\.1", 10)
        server.wait_for(r"client-0\.1 serves again", SECONDS)
        wait_until_gone([api_server], END_SECONDS)
        assert streams(server) == undisturbed
    assert server.process.returncode == 0, server.log


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_of_every_layout_with_engine_and_api_server_killed_are_unchanged(checkpoint, layout):
    """The server's own answers are compared: those of other layouts differ in the last bits."""
    with serve(checkpoint, *OPTIONS, *LAYOUTS[layout], "--api-server-count", "2") as server:
        expected = streams(server)
        check_constrained(expected)
        engine, api_server = server.child("engine-0"), server.child("client-0")
        assert streams(server, lambda: os.kill(engine, signal.SIGKILL)) == expected
        answers = streams(server, lambda: os.kill(api_server, signal.SIGKILL))
        assert all(answer in (None, whole) for answer, whole in zip(answers, expected, strict=True))
        assert streams(server) == expected


def test_killed_supervisor_leaves_no_process(checkpoint):
    with serve(checkpoint, *OPTIONS, *TWO_ENGINES, *WORKERS, "--api-server-count", "2") as server:
        pids = server.children
        assert len(pids) == 4
        pids += [pid for name in ("engine-0", "engine-1") for pid in workers_of(server.child(name))]
        assert len(pids) == 6
        os.kill(pids[-1], signal.SIGSTOP)
        server.end(signal.SIGKILL)
        wait_until_gone(pids, END_SECONDS)
