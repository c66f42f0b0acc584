"""Several engines and several API servers behind one address: routing, metrics, and exits of processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from checkpoints import make_checkpoint
from fleets import (
    SECONDS,
    connect,
    generated,
    label,
    server_of,
    stream_tokens,
    tokens,
    wait_until_running,
    wait_until_whole,
)
from serving import is_running, serve, wait_until_gone

from eagleray import LLM, SamplingParams

PROMPT = [5, 6, 7]
LONG = 3000
"""Tokens of a stream that is long enough to be disturbed."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", max_position_embeddings=10_000))


OPTIONS = ("--max-model-len", "10000", "--log-level", "debug", "--dtype", "float32")


@pytest.fixture(scope="module")
def server(checkpoint):
    with serve(checkpoint, *OPTIONS, "--data-parallel-size", "2", "--api-server-count", "2") as server:
        yield server
    assert server.process.returncode == 0, server.log
    wait_until_gone([server.process.pid], SECONDS)


@pytest.fixture
def http(server):
    with connect(server) as http:
        wait_until_whole(http, 2)
        yield http


@contextlib.contextmanager
def stream(http: httpx.Client, count: int = LONG, *, rank: int | None = None) -> Iterator[Iterator[list[int]]]:
    """Yield the tokens of each event of a greedy stream, which ends with the block."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    with contextlib.closing(stream_tokens(http, PROMPT, headers, max_tokens=count, temperature=0)) as events:
        yield events


def flat(events: Iterator[list[int]]) -> list[int]:
    return [token_id for event in events for token_id in event]


@pytest.mark.parametrize("rank", [0, 1])
def test_routing_request_names_rank_runs_there(http, rank):
    before = generated(http)
    for _ in range(3):
        tokens(http, PROMPT, {"X-data-parallel-rank": str(rank)}, max_tokens=5)
    wait_until_whole(http, 2)
    after = generated(http)
    assert after[rank] == before[rank] + 15
    assert after[1 - rank] == before[1 - rank]


@pytest.mark.parametrize("rank", ["2", "-1", "first", ""])
def test_routing_request_names_unknown_rank_is_400(http, rank):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    response = http.post("/inference/v1/generate", json=body, headers={"X-data-parallel-rank": rank})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-data-parallel-rank"


def test_routing_session_is_sent_to_one_engine(http):
    for session in ("mine", "yours", "theirs"):
        before = generated(http)
        for i in range(6):
            tokens(http, [10 + i] * 40, {"X-Session-ID": session}, max_tokens=4)
        wait_until_whole(http, 2)
        grown = {rank: count - before[rank] for rank, count in generated(http).items()}
        assert sorted(grown.values()) == [0, 24], session


def test_routing_many_requests_use_both_engines(http):
    before = generated(http)
    threads = [threading.Thread(target=tokens, args=(http, [20 + i] * 3), kwargs={"max_tokens": 50}) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    wait_until_whole(http, 2)
    grown = {rank: count - before[rank] for rank, count in generated(http).items()}
    assert sum(grown.values()) == 24 * 50
    assert min(grown.values()) >= 6 * 50


def test_metrics_of_each_api_server_are_equal(http):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
    answered: set[int] = set()
    for _ in until_deadline("both API servers have answered"):
        with http.stream("POST", "/inference/v1/generate", json=body) as response:
            answered.add(server_of(response))
            response.read()
        if len(answered) == 2:
            break
    wait_until_whole(http, 2)
    samples: dict[int, list[str]] = {}
    for _ in until_deadline("both API servers have sent their metrics"):
        with http.stream("GET", "/metrics") as response:
            server = server_of(response)
            samples[server] = [line for line in response.iter_lines() if line.startswith(COUNTED)]
        if len(samples) == 2:
            break
    assert samples.keys() == answered
    one, other = samples.values()
    assert one == other
    assert len(one) > len(COUNTED)


COUNTED = ("eagleray:request_success_total", "eagleray:request_generation_tokens", "eagleray:generation_tokens_total")
"""Metrics that a request for metrics does not change."""


def until_deadline(what: str) -> Iterator[None]:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        yield
    raise AssertionError(f"not within {SECONDS:.0f} s: {what}")


def test_fleet_engine_killed_streams_have_all_tokens(server, http):
    expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
    there = wait_until_whole(http, 2)
    with stream(http) as hit:
        got_hit = next(hit)
        rank, incarnation = wait_until_running(http)
        with stream(http, rank=1 - rank) as other:
            got_other = next(other)
            os.kill(server.child(label(rank, incarnation)), signal.SIGKILL)
            got_hit += flat(hit)
            got_other += flat(other)
    assert got_other == expected
    assert got_hit == expected
    assert wait_until_whole(http, 2) == there | {rank: incarnation + 1}


@pytest.mark.grid  # both are killed one after another, and in chaos within seconds
def test_fleet_both_engines_killed_streams_have_all_tokens(server, http):
    there = wait_until_whole(http, 2)
    expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
    with stream(http) as one, stream(http) as two:
        got = [next(one), next(two)]
        for rank, incarnation in there.items():
            os.kill(server.child(label(rank, incarnation)), signal.SIGKILL)
        # A new request waits together with the streams.
        assert tokens(http, PROMPT, max_tokens=10, temperature=0) == expected[:10]
        assert got[0] + flat(one) == expected
        assert got[1] + flat(two) == expected
    assert wait_until_whole(http, 2) == {rank: incarnation + 1 for rank, incarnation in there.items()}


@pytest.mark.grid  # test_streams_survive.py stops an engine of two too
def test_fleet_engine_stopped_is_replaced(checkpoint):
    options = (*OPTIONS, "--data-parallel-size", "2", "--heartbeat-timeout", "2")
    with serve(checkpoint, *options) as server, connect(server) as http:
        wait_until_whole(http, 2)
        expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        with stream(http, rank=0) as lines:
            got = next(lines)
            os.kill(server.child("engine-0"), signal.SIGSTOP)
            assert got + flat(lines) == expected
        assert wait_until_whole(http, 2) == {0: 1, 1: 0}


def test_fleet_api_server_killed_is_replaced_and_others_continue(server, http):
    expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
    pids = {name: server.child(name) for name in ("client-0", "client-1")}
    with stream(http) as lines:
        got = next(lines)
        holder = _server_with_a_request(http)
        (victim,) = [name for name, pid in pids.items() if pid != holder]
        os.kill(pids[victim], signal.SIGKILL)
        assert got + flat(lines) == expected
    server.wait_for(rf"{victim}\.1 is process \d+", SECONDS)
    for _ in until_deadline("the new API server has answered"):
        with http.stream("GET", "/live") as response:
            if server_of(response) == server.child(f"{victim}.1"):
                break


def test_dashboard_of_each_api_server_has_the_same_members_and_events(server, http):
    """Also of the one that has replaced another."""
    states = {}
    for _ in until_deadline("both API servers have answered"):
        with http.stream("GET", "/dashboard/state") as response:
            pid = server_of(response)
            states[pid] = json.loads(response.read())
        if len(states) == 2:
            break
    one, other = states.values()
    assert one["server"] != other["server"]
    assert [_without_load(row) for row in one["engines"]] == [_without_load(row) for row in other["engines"]]
    assert [row["pid"] for row in one["api_servers"]] == [row["pid"] for row in other["api_servers"]]
    assert set(states) == {row["pid"] for row in one["api_servers"]}
    times, same_times = (
        {(event["member"], event["kind"]): event["time"] for event in state["events"]} for state in (one, other)
    )
    assert len(times) >= 4
    assert times.keys() == same_times.keys()
    # A server takes the time of its own start from its own clock.
    different = {member for (member, kind), at in times.items() if same_times[member, kind] != at}
    assert different <= {one["server"], other["server"]}


def _without_load(row):
    """Return the facts about an engine that an API server has from the membership alone."""
    return {name: row[name] for name in ("label", "state", "since", "restarts", "cause", "host", "pid", "workers")}


def _server_with_a_request(http: httpx.Client) -> int:
    """Return the process id of the API server that has a request in flight, from /load."""
    for _ in until_deadline("a server has something in flight"):
        with http.stream("GET", "/load") as response:
            pid = server_of(response)
            if json.loads(response.read())["server_load"]:
                return pid
    raise AssertionError


@pytest.mark.grid  # test_streams_survive.py kills the only engine too
def test_fleet_only_engine_killed_stream_resumes_after_restart(checkpoint):
    with serve(checkpoint, *OPTIONS) as server, connect(server) as http:
        expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        with stream(http) as lines:
            got = next(lines)
            os.kill(server.child("engine-0"), signal.SIGKILL)
            assert got + flat(lines) == expected
        assert wait_until_whole(http, 1) == {0: 1}


def test_fleet_engine_and_api_server_killed_requests_wait(checkpoint):
    with serve(checkpoint, *OPTIONS) as server, connect(server) as http:
        expected = tokens(http, PROMPT, max_tokens=10, temperature=0)
        os.kill(server.child("engine-0"), signal.SIGKILL)
        os.kill(server.child("client-0"), signal.SIGKILL)
        wait_until_gone([server.child("client-0")], SECONDS)
        for _ in range(3):
            assert tokens(http, PROMPT, max_tokens=10, temperature=0) == expected
        assert wait_until_whole(http, 1) == {0: 1}


def test_llm_engine_killed_batch_is_complete(checkpoint):
    prompts = [[3 + i, 4, 5] for i in range(40)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=200, ignore_eos=True)
    with LLM(checkpoint, data_parallel_size=2, num_threads=1, dtype="float32", max_model_len=400) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        engine = child_of_ours("engine-1")
        killer = threading.Thread(target=kill_at_work, args=(engine, cpu_seconds(engine)))
        killer.start()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        killer.join(SECONDS)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert not is_running(engine)


def kill_at_work(pid: int, before: float) -> None:
    """Kill the process once it has computed for 0.1 s since `before`, its CPU time in seconds."""
    while cpu_seconds(pid) < before + 0.1:
        pass
    os.kill(pid, signal.SIGKILL)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child_of_ours(name: str) -> int:
    """Return the process id of the child of this process that has this label."""
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[-1] == name.encode():
                return int(pid)
    raise AssertionError(f"there is no {name}")
