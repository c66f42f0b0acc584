"""Engines and API servers come and go at run time, by HTTP and in Python, while answers stay the same."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import make_checkpoint
from fleets import (
    POLL_SECONDS,
    SECONDS,
    connect,
    engines,
    incarnations,
    metrics,
    server_of,
    stream_tokens,
    tokens,
    wait_until_whole,
)
from serving import ServerProcess, serve, wait_until_gone

from eagleray import LLM, SamplingParams

OPTIONS = ("--max-model-len", "4000", "--log-level", "debug", "--dtype", "float32")
NUM_STREAMS = 4
NUM_TOKENS = 600


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", max_position_embeddings=4000))


@pytest.fixture(scope="module")
def server(checkpoint):
    with serve(checkpoint, *OPTIONS, "--api-server-count", "2") as server:
        yield server
    assert server.process.returncode == 0, server.log


@pytest.fixture
def http(server):
    with connect(server) as http:
        yield http


@pytest.fixture(scope="module")
def expected(server):
    with connect(server) as http, ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(lambda index: one_stream(http, index), range(NUM_STREAMS)))


def one_stream(http: httpx.Client, index: int) -> list[int]:
    events = stream_tokens(http, [5 + index, 6, 7], max_tokens=NUM_TOKENS, temperature=index % 2, seed=index)
    return [token for event in events for token in event]


@contextlib.contextmanager
def streams(server: ServerProcess, expected: list[list[int]]) -> Iterator[None]:
    """Keep streams running in the block, and check that each has all its tokens."""
    has_ended = threading.Event()

    def repeat(index: int) -> int:
        count = 0
        while count == 0 or not has_ended.is_set():
            with connect(server) as http:
                assert one_stream(http, index) == expected[index]
            count += 1
        return count

    with ThreadPoolExecutor(NUM_STREAMS) as pool, connect(server) as http:
        running: list[Future[int]] = [pool.submit(repeat, index) for index in range(NUM_STREAMS)]
        try:
            wait_until_all_run(http)
            yield
        finally:
            has_ended.set()
        assert sum(future.result() for future in running) >= NUM_STREAMS


def wait_until_all_run(http: httpx.Client) -> None:
    """Wait until every engine computes requests."""
    wait_until_run(http, len(engines(http)))


def wait_until_run(http: httpx.Client, count: int) -> None:
    """Wait until this many engines compute requests."""
    deadline = time.monotonic() + SECONDS
    while sum(bool(engine["load"] and engine["load"]["num_running"]) for engine in engines(http)) < count:
        assert time.monotonic() < deadline, f"an engine has no request: {engines(http)}"
        time.sleep(POLL_SECONDS)


def post(http: httpx.Client, route: str, **fields: Any) -> dict[str, Any]:
    response = http.post(route, json=fields)
    assert response.status_code == (200 if fields.get("wait", True) else 202), response.text
    status: dict[str, Any] = response.json()
    return status


def wait_for_phase(http: httpx.Client, operation_id: str, phase: str) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS
    while (status := http.get("/scale", params={"operation_id": operation_id}).json())["phase"] != phase:
        assert time.monotonic() < deadline and status["phase"] != "failed", status
        time.sleep(POLL_SECONDS)
    return dict(status)


def resumed(http: httpx.Client) -> float:
    return sum(value for name, value in metrics(http).items() if "requests_resumed_total" in name)


def test_scale_up_starting_engine_killed_streams_are_unchanged(server, http, expected):
    with streams(server, expected):
        begun = post(http, "/scale", data_parallel_size=2, operation_id="up", wait=False)
        assert (begun["phase"], begun["participating_ranks"]) == ("preparing", [0])
        assert http.get("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": True}
        os.kill(server.child("engine-1"), signal.SIGKILL)
        status = wait_for_phase(http, "up", "completed")
        assert status["participating_ranks"] == [0, 1]
        assert incarnations(http) == {0: 0, 1: 1}
        wait_until_all_run(http)
    assert post(http, "/scale", data_parallel_size=2, operation_id="up") == status, "it is the same operation"
    # Every request makes a connection of its own, so both API servers are asked.
    assert all(http.get("/scale").json() == status for _ in range(6))
    assert len(tokens(http, [5, 6], {"X-data-parallel-rank": "1"}, max_tokens=3)) == 3


@pytest.mark.grid  # tests/unit/fleet/test_scaling.py tests the machine
def test_restart_with_drain_requests_finish_where_they_are(server, http, expected):
    before = resumed(http)
    with streams(server, expected):
        status = post(http, "/restart", ranks=[1], drain_timeout=SECONDS)
        assert (status["kind"], status["phase"]) == ("restart", "completed")
    assert resumed(http) == before
    assert wait_until_whole(http, 2) == {0: 0, 1: 2}


def test_scale_down_by_the_first_rank_streams_move(server, http, expected):
    process, before = server.child("engine-0"), resumed(http)
    with streams(server, expected):
        status = post(http, "/scale", data_parallel_size=1, remove_ranks=[0])
        wait_until_gone([process], 0.1)
        assert (status["participating_ranks"], status["safe_to_delete_ranks"]) == ([1], [0])
    assert resumed(http) > before
    refused = http.post("/inference/v1/generate", json={"token_ids": [5]}, headers={"X-data-parallel-rank": "0"})
    assert refused.status_code == 400


def test_restart_with_options_streams_are_unchanged(server, http, expected):
    before = incarnations(http)
    with streams(server, expected):
        status = post(http, "/restart", options={"max_num_seqs": 64})
        assert (status["engine_options"], status["participating_ranks"]) == ({"max_num_seqs": 64}, [1])
    assert incarnations(http) == {1: before[1] + 1}
    assert "64 requests of the full length" in server.log
    refused = http.post("/restart", json={"options": {"data_parallel_size": 3}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data_parallel_size")


@pytest.mark.slow  # tests/unit/fleet/test_rolling_restart.py tests the machine
def test_restart_with_another_checkpoint_and_back(server, http, expected, checkpoint, tmp_path):
    other = str(make_checkpoint(tmp_path / "other", "qwen3", max_position_embeddings=4000, seed=7))
    (Path(other) / "tokenizer.json").unlink(missing_ok=True)
    with ThreadPoolExecutor(1) as pool, connect(server) as stream:
        running = pool.submit(one_stream, stream, 0)
        wait_until_run(http, 1)
        status = post(http, "/restart", options={"model": other}, drain_timeout=SECONDS)
        assert running.result() == expected[0], "it ended where it began"
    assert status["engine_options"]["model"] == other
    assert http.get("/weight_info").json()["weight_version"] == "1"
    assert one_stream(http, 0) != expected[0]
    broken = http.post("/restart", json={"options": {"model": checkpoint, "num_kv_blocks": 1}})
    assert broken.status_code == 400 and "the cache has room for 1 blocks" in broken.text
    assert post(http, "/restart", options={"model": checkpoint})["engine_options"].get("model") is None
    assert one_stream(http, 0) == expected[0]


@pytest.mark.grid  # test_api_servers.py has a server that leaves
def test_scale_api_servers_streams_finish(server, http, expected):
    with streams(server, expected):
        post(http, "/scale", api_server_count=1, drain_timeout=SECONDS, operation_id="servers", wait=False)
        wait_for_phase(http, "servers", "completed")
    with contextlib.ExitStack() as stack:
        servers = {server_of(stack.enter_context(http.stream("GET", "/live"))) for _ in range(4)}
    assert servers == {server.child("client-0")}
    assert post(http, "/scale", api_server_count=2)["active_api_server_count"] == 2


@pytest.mark.grid  # the restart of one engine is tested above
def test_restart_rolling_streams_are_unchanged(server, http, expected):
    post(http, "/scale_elastic_ep", new_data_parallel_size=2)
    before = wait_until_whole(http, 2)
    with streams(server, expected):
        post(http, "/restart")
    assert wait_until_whole(http, 2) == {rank: incarnation + 1 for rank, incarnation in before.items()}


@pytest.mark.grid  # tests/unit/fleet/test_scaling.py tests the machine
def test_scale_engine_that_cannot_start_is_rolled_back(server, http, checkpoint):
    ranks = http.get("/scale").json()["participating_ranks"]
    weights = Path(checkpoint) / "model.safetensors"
    hidden = weights.rename(weights.with_suffix(".hidden"))
    try:
        failed = http.post("/scale", json={"data_parallel_size": len(ranks) + 1, "operation_id": "broken"})
    finally:
        hidden.rename(weights)
    assert failed.status_code == 400 and "safetensors" in failed.text
    status = http.get("/scale?operation_id=broken").json()
    assert (status["phase"], status["participating_ranks"]) == ("failed", ranks)
    assert status["last_error"] == failed.json()["error"]["message"]
    assert len(tokens(http, [5, 6], max_tokens=3)) == 3


@pytest.mark.grid  # the routes above make the same calls
def test_llm_scale_prompts_are_unchanged(checkpoint):
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + index, 6, 7]} for index in range(24)]

    def generate(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    llm = LLM(checkpoint, max_model_len=4000, dtype="float32", num_threads=1, max_num_seqs=4)
    whole = generate(llm)
    assert llm.scaling_status()["phase"] == "idle"
    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(generate, llm)
        assert llm.scale(data_parallel_size=2)["participating_ranks"] == [0, 1]
        assert llm.get_world_size() == 2
        assert outputs.result() == whole
        outputs = pool.submit(generate, llm)
        assert llm.scale(remove_ranks=[0], operation_id="down")["participating_ranks"] == [1]
        assert llm.scaling_status("down")["phase"] == "completed"
        assert outputs.result() == whole
    with pytest.raises(ValueError, match="at least one must stay"):
        llm.scale(remove_ranks=[1])
