"""Requests keep their tokens over a pause, on two engines behind two API servers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from checkpoints import make_checkpoint
from fleets import POLL_SECONDS, SECONDS, connect, engines, incarnations, wait_until_whole
from serving import serve

NUM_REQUESTS = 32
NUM_TOKENS = 800
OPTIONS = ("--max-model-len", "2000", "--log-level", "debug", "--num-kv-blocks", "6000")
FLEET = ("--data-parallel-size", "2", "--api-server-count", "2")

Answer = Future[dict[str, Any]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return two checkpoints with equal shapes and different weights."""
    directories = [tmp_path_factory.mktemp("checkpoint") for _ in range(2)]
    return [
        str(make_checkpoint(directory, "qwen3", max_position_embeddings=2000, seed=seed))
        for seed, directory in enumerate(directories)
    ]


@pytest.fixture(scope="module")
def server(checkpoints):
    with serve(checkpoints[0], *OPTIONS, *FLEET) as server:
        yield server


@pytest.fixture
def http(server):
    with connect(server) as http:
        wait_until_whole(http, 2)
        yield http


@pytest.fixture(scope="module")
def undisturbed(server):
    with connect(server) as http:
        wait_until_whole(http, 2)
        return tokens_of(generate(http))


def generate(
    http: httpx.Client, disturb: Callable[[list[Answer]], object] | None = None, *, num_tokens: int = NUM_TOKENS
) -> list[Answer]:
    """Send all requests, call `disturb` when the engines have them, and wait for the answers."""

    def send(index: int) -> dict[str, Any]:
        params = {"ignore_eos": True, "temperature": index % 2, "seed": index, "max_tokens": num_tokens}
        body = {"token_ids": [1 + index, 5, 6], "sampling_params": params}
        response = http.post("/inference/v1/generate", json=body)
        assert response.status_code == 200, response.text
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [pool.submit(send, index) for index in range(NUM_REQUESTS)]
        if disturb is not None:
            wait_until_loaded(http)
            disturb(answers)
    return answers


def wait_until_loaded(http: httpx.Client) -> None:
    """Wait until the engines report all requests."""
    deadline = time.monotonic() + SECONDS
    while sum(load["num_running"] + load["num_waiting"] for load in loads(http)) < NUM_REQUESTS:
        assert time.monotonic() < deadline, f"the requests do not arrive: {engines(http)}"
        time.sleep(POLL_SECONDS)


def loads(http: httpx.Client) -> list[dict[str, int]]:
    return [engine["load"] for engine in engines(http) if engine["load"]]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.result()["token_ids"] for answer in answers]


def post(http: httpx.Client, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check_kept(pause: dict[str, Any], answers: list[Answer]) -> None:
    """Check that only requests that had finished before the pause have answers."""
    assert pause["status"] == "paused" and pause["num_aborted"] == 0 < pause["num_kept"]
    assert sum(answer.done() for answer in answers) <= NUM_REQUESTS - pause["num_kept"]


def test_pause_keep_and_resume_tokens_are_unchanged(http, undisturbed):
    def disturb(answers):
        pause = post(http, "/pause?mode=keep")
        assert all(http.get("/is_paused").json() == {"is_paused": True} for _ in range(6))  # on both servers
        check_kept(pause, answers)
        assert post(http, "/resume") == {"status": "resumed"}

    assert tokens_of(generate(http, disturb)) == undisturbed


def test_pause_keep_engine_killed_tokens_are_unchanged(server, http, undisturbed):
    """The requests of the engine wait on the other one, and the engine that replaces it starts paused."""

    def disturb(answers):
        pause = post(http, "/pause?mode=keep")
        before = incarnations(http)
        os.kill(server.child("engine-0"), signal.SIGKILL)
        server.wait_for(r"engine-0\.1 has joined", SECONDS)
        assert incarnations(http) != before
        check_kept(pause, answers)
        post(http, "/resume")

    assert tokens_of(generate(http, disturb)) == undisturbed


def test_pause_abort_answers_have_what_there_is(http, undisturbed):
    pauses: list[dict[str, Any]] = []
    answers = generate(http, lambda _: pauses.append(post(http, "/pause")))
    choices = [answer.result() for answer in answers]
    assert sum(choice["finish_reason"] == "abort" for choice in choices) == pauses[0]["num_aborted"] > 0
    for tokens, choice in zip(undisturbed, choices, strict=True):
        count = len(choice["token_ids"])
        assert choice["token_ids"] == tokens[:count]
        assert choice["weight_versions"] == ([{"version": "default", "start": 0, "end": count}] if count else [])
    post(http, "/resume")


def test_update_during_a_pause_tokens_have_their_versions(http, undisturbed, checkpoints):
    """Runs last, because the server has other weights afterwards."""

    def disturb(answers):
        pause = post(http, "/pause?mode=keep")
        answer = post(http, "/update_weights", {"weight_dir": checkpoints[1], "weight_version": "step-1"})
        assert (answer["update"], answer["weight_version"]) == (1, "step-1")
        check_kept(pause, answers)
        post(http, "/resume")

    choices = [answer.result() for answer in generate(http, disturb)]
    assert {choice["weight_versions"][-1]["version"] for choice in choices} >= {"step-1"}
    for tokens, choice in zip(undisturbed, choices, strict=True):
        old = choice["weight_versions"][0]
        assert (old["version"], old["start"]) == ("default", 0)
        assert choice["token_ids"][: old["end"]] == tokens[: old["end"]]
        assert choice["weight_versions"][1:] in (
            [],  # it had finished
            [{"version": "step-1", "start": old["end"], "end": NUM_TOKENS}],
        )
    updated = generate(http, num_tokens=100)
    versions = [{"version": "step-1", "start": 0, "end": 100}]
    assert all(answer.result()["weight_versions"] == versions for answer in updated)
    with serve(checkpoints[1], *OPTIONS) as fresh, connect(fresh) as other:
        assert tokens_of(updated) == tokens_of(generate(other, num_tokens=100))
