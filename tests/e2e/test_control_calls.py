"""Control calls on two engines and two API servers: requests survive them, all members agree, exits change nothing."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoints import make_checkpoint
from fleets import SECONDS, connect, incarnations, label, server_of, stream_tokens, tokens, wait_until_whole
from oracle import oracle
from safetensors.torch import load_file
from serving import serve
from sglang_trainer import SGLangTrainer

PROMPT = [5, 6, 7]
COUNT = 600
"""Tokens of a request that is still running when calls are made."""
SIZE = {"max_position_embeddings": 10_000}
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return two checkpoints that differ in their weights alone."""
    return [make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=seed, **SIZE) for seed in (0, 1)]


@pytest.fixture(scope="module")
def server(checkpoints):
    options = ("--max-model-len", "10000", "--log-level", "debug", "--dtype", "float32", "--enable-sglang-api")
    sizes = ("--data-parallel-size", "2", "--api-server-count", "2")
    with serve(str(checkpoints[0]), *options, *sizes) as server:
        yield server
    assert server.process.returncode == 0, server.log


@pytest.fixture
def http(server):
    with connect(server) as http:
        wait_until_whole(http, 2)
        yield http


def call(http, path, body=None, *, status=200, headers=None):
    """Make a call. `body`: None for none."""
    response = http.post(path, headers=headers, **({} if body is None else {"json": body}))
    assert response.status_code == status, response.text
    return response.json()


def info(http):
    return http.get("/weight_info").json()


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition does not become true"
        time.sleep(0.02)
    return value


class Running:
    """Requests that stream in threads."""

    def __init__(self, http, count, **params):
        self._received = [0] * count
        self._pool = ThreadPoolExecutor(count)
        self._futures = [self._pool.submit(self._run, http, index, params) for index in range(count)]

    def _run(self, http, index, params):
        found = []
        for token_ids in stream_tokens(http, [*PROMPT, 10 + index], **GREEDY, **params):
            found += token_ids
            self._received[index] = len(found)
        return found

    @property
    def received(self):
        """Numbers of tokens that have come."""
        return list(self._received)

    def wait_until_begun(self):
        wait_for(lambda: all(self._received))
        return self

    def results(self):
        """Return the tokens of each request."""
        found = [future.result(SECONDS) for future in self._futures]
        self._pool.shutdown()
        return found


def test_pause_keep_stops_requests_and_resume_continues_them(http):
    expected = [tokens(http, [*PROMPT, 10 + index], max_tokens=COUNT, **GREEDY) for index in range(4)]
    running = Running(http, 4, max_tokens=COUNT).wait_until_begun()
    paused = call(http, "/pause?mode=keep")
    assert paused["status"] == "paused"
    assert paused["num_kept"] + sum(number == COUNT for number in running.received) >= 4
    assert http.get("/is_paused").json() == {"is_paused": True}
    wait_for(lambda: http.get("/ready").status_code == 503)
    assert http.get("/ready").json()["error"]["code"] == "paused"
    assert http.get("/health").status_code == 200
    before = running.received
    late = Running(http, 1, max_tokens=3)
    assert call(http, "/pause?mode=keep")["num_kept"] >= paused["num_kept"]
    assert (running.received, late.received) == (before, [0])
    assert call(http, "/resume") == {"status": "resumed"}
    assert running.results() == expected
    assert late.results() == [expected[0][:3]]
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_pause_abort_delivers_the_output_so_far(http):
    running = Running(http, 2, max_tokens=9_000).wait_until_begun()
    aborted = call(http, "/pause")
    assert aborted["num_aborted"] == 2
    assert all(0 < len(found) < 9_000 for found in running.results())
    call(http, "/resume")


def test_resume_ends_a_pause_that_waits(http):
    running = Running(http, 1, max_tokens=9_000).wait_until_begun()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, http, "/pause?mode=wait", status=409)
        wait_for(lambda: (info(http)["operation"] or {}).get("name") == "pause")
        call(http, "/resume")
        assert waiting.result(SECONDS)["error"]["code"] == "wrong_state"
    assert call(http, "/inference/v1/abort_requests") == {"status": "aborted", "aborted": 1}
    assert 0 < len(running.results()[0]) < 9_000


def test_abort_requests_finds_them_on_every_server(http):
    with ThreadPoolExecutor(4) as pool:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9_000, "ignore_eos": True}}
        found = [
            pool.submit(http.post, "/inference/v1/generate", json=body, headers={"X-Request-Id": f"mine{index}"})
            for index in range(4)
        ]
        aborted = 0
        while aborted < 4:
            ids = [f"mine{index}" for index in range(4)]
            aborted += call(http, "/abort_requests", {"request_ids": ids})["aborted"]
        reasons = [future.result(SECONDS).json()["choices"][0]["finish_reason"] for future in found]
    assert reasons == ["abort"] * 4


def test_sleep_keeps_requests_and_wake_up_continues_them(http):
    expected = tokens(http, [*PROMPT, 10], max_tokens=COUNT, **GREEDY)
    running = Running(http, 1, max_tokens=COUNT).wait_until_begun()
    asleep = call(http, "/sleep?level=1&mode=keep")
    assert asleep["level"] == 1
    assert asleep["freed_bytes"] > 0
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert call(http, "/resume", status=409)["error"]["code"] == "wrong_state"
    assert call(http, "/wake_up?tags=weights")["status"] == "sleeping"
    assert call(http, "/wake_up?tags=kv_cache") == {"status": "awake", "tags": []}
    assert running.results() == [expected]


def test_engine_and_api_server_killed_in_a_pause_successors_are_paused(server, http):
    call(http, "/pause?mode=keep")
    before = incarnations(http)
    os.kill(server.child(label(0, before[0])), signal.SIGKILL)
    with http.stream("GET", "/live") as response:
        os.kill(server_of(response), signal.SIGKILL)
    wait_for(lambda: {engine["state"] for engine in info(http)["engines"]} == {"ready"} and _is_newer(http, before))
    late = Running(http, 3, max_tokens=3)
    assert http.get("/is_paused").json() == {"is_paused": True}
    assert late.received == [0, 0, 0]
    call(http, "/resume")
    assert all(len(found) == 3 for found in late.results())


def _is_newer(http, before):
    engines = {engine["rank"]: engine["incarnation"] for engine in info(http)["engines"]}
    return len(engines) == 2 and engines[0] > before[0]


def test_update_from_a_directory_while_requests_are_kept(http, checkpoints):
    """The calls go to any server; tokens before the update are the old model's, later ones the new one's."""
    running = Running(http, 6, max_tokens=COUNT).wait_until_begun()
    call(http, "/pause?mode=keep")
    before = running.received
    body = {"weight_dir": str(checkpoints[1]), "weight_version": "step-1"}
    checksums = call(http, "/weight_checker", {"action": "checksum"})["checksums"]
    with ThreadPoolExecutor(2) as pool:  # the second one joins the first, or repeats it
        headers = {"X-Request-Id": "update-1"}
        first, second = list(pool.map(lambda _: call(http, "/update_weights", body, headers=headers), range(2)))
    assert first == second
    assert (first["message"], first["weight_version"], first["update"]) == ("Weights updated", "step-1", 1)
    assert call(http, "/finish_weight_update", {"weight_version": "step-1"})["update"] == 1
    call(http, "/resume")
    found = running.results()
    assert all(len(one) == COUNT for one in found)
    for index, (number, one) in enumerate(zip(before, found, strict=True)):
        if number:
            oracle(checkpoints[0]).assert_greedy([*PROMPT, 10 + index], one[: max(1, number)])
    comparison = call(http, "/weight_checker", {"action": "compare", "baseline": checksums})
    assert {f"dp{rank}:pp0:tp0:model.embed_tokens.weight" for rank in range(2)} <= set(comparison["mismatches"])
    assert not comparison["match"]
    weights = info(http)
    assert (weights["update"], weights["required"], weights["weight_version"]) == (1, 1, "step-1")
    assert {(engine["weight_version"], engine["state"]) for engine in weights["engines"]} == {("step-1", "ready")}
    for index in range(4):  # both engines
        prompt = [*PROMPT, 40 + index]
        oracle(checkpoints[1]).assert_greedy(prompt, tokens(http, prompt, max_tokens=30, **GREEDY))


def test_update_of_a_directory_that_does_not_exist_is_refused_and_the_weights_stay(http):
    version = info(http)["weight_version"]
    error = call(http, "/update_weights", {"weight_dir": "/nowhere/at/all"}, status=404)["error"]
    assert "/nowhere/at/all" in error["message"]
    assert info(http)["weight_version"] == version
    assert call(http, "/finish_weight_update", status=404)["error"]["code"] == "not_found"
    assert call(http, "/abort_weight_update")["message"] == "Weight update aborted"
    assert len(tokens(http, PROMPT, max_tokens=3)) == 3


def test_trainer_for_sglang_pushes_weights_while_rollouts_run(http, checkpoints):
    """It breaks rollouts off, sends all weights in two calls, and continues with the tokens of before."""
    trainer = SGLangTrainer(http)
    assert trainer.num_gpus == 2
    trainer.connect()
    weights = load_file(checkpoints[0] / "model.safetensors")
    names = sorted(weights)  # q_proj and v_proj, which are packed together, come in different calls
    chunks = [[(name, weights[name]) for name in names if ("q_proj" in name) == first] for first in (True, False)]
    prompt = [*PROMPT, 70]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(trainer.generate, prompt, max_new_tokens=9_000, ignore_eos=True) for _ in range(4)]
        wait_for(lambda: trainer.num_requests() == 4)
        trainer.update_weights(chunks, 7)
        partial = [future.result(SECONDS) for future in running]
    assert {kind for _, _, kind, _ in partial} == {"abort"}
    assert trainer.get_weight_version() == "7"
    for tokens_before, logprobs, _, version in partial:
        assert len(tokens_before) == len(logprobs) < 9_000
        assert version != "7"
    so_far = [*prompt, *partial[0][0]]
    found, _, kind, version = trainer.generate(so_far, max_new_tokens=20, ignore_eos=True)
    assert (len(found), kind, version) == (20, "length", "7")
    oracle(checkpoints[0]).assert_greedy(so_far, found)
    trainer.abort_until_idle()
    trainer.update_weights_from_disk(str(checkpoints[1]), 8)
    found, _, _, version = trainer.generate(prompt, max_new_tokens=20, ignore_eos=True)
    assert version == "8"
    oracle(checkpoints[1]).assert_greedy(prompt, found)
    trainer.close()


def test_liveness_and_world_size(http):
    assert http.get("/liveness").json() == {"status": "ok"}
    assert http.get("/get_world_size").json() == {"world_size": 2}


def test_sigterm_waits_for_the_end_of_an_open_update(server, http):
    """The last test of this server."""
    call(http, "/start_weight_update")
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: http.get("/ready").status_code == 503)
    assert info(http)["state"] == "updating"
    call(http, "/abort_weight_update")
    assert server.wait() == 0
