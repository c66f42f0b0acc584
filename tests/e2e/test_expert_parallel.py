"""Two engines that share experts behind one address: they answer as one does, step together only while one of them has
work, and lose nothing when one of them exits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import make_checkpoint
from fleets import SECONDS, connect, incarnations, label, metrics, stream_tokens, tokens, wait_until_whole
from harness import LocalEngine, random_prompt
from serving import ServerProcess, serve, wait_until_gone

from eagleray.messages.grammars import Grammar

NUM_PROMPTS = 8
REGEX = "([a-z]{3}[0-9]{2} )+"
LONG = 400
"""Number of tokens that keeps a request running while the test acts."""

OPTIONS = ("--max-model-len", "1024", "--num-kv-blocks", "256", "--dtype", "float32", "--log-level", "debug")
TOGETHER = (*OPTIONS, "--data-parallel-size", "2", "--enable-expert-parallel")

CLOCK = os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_moe")


@pytest.fixture(scope="module")
def prompts():
    return [random_prompt(seed, 5 + 17 * seed, 384) for seed in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def answers(checkpoint, prompts):
    """Return the answers of one engine that has all experts."""
    with LocalEngine(checkpoint, dtype="float32", max_model_len=1024, num_kv_blocks=512) as engine:
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, max_tokens=LONG)
            engine.add(f"regex {number}", prompt, max_tokens=20, grammar=Grammar(kind="regex", source=REGEX))
        return engine.run()


@pytest.fixture(scope="module")
def expected(answers):
    return [answers[str(number)].token_ids for number in range(NUM_PROMPTS)]


@pytest.fixture(scope="module", params=["all-gather", pytest.param("all-to-all", marks=pytest.mark.grid)])
def server(checkpoint, request):
    with serve(str(checkpoint), *TOGETHER, "--expert-dispatch", request.param) as server:
        yield server
    assert server.process.returncode == 0, server.log
    wait_until_gone([server.process.pid], SECONDS)


@pytest.fixture
def http(server):
    with connect(server) as http:
        wait_until_whole(http, 2)
        yield http


@pytest.mark.parametrize("rank", [0, 1])
def test_expert_group_one_busy_engine_other_steps_along(http, prompts, expected, rank):
    for number in (0, 3):
        got = tokens(http, prompts[number], {"X-data-parallel-rank": str(rank)}, max_tokens=20, temperature=0)
        assert got == expected[number][:20]


def test_expert_group_both_busy_tokens_equal_one_engine(http, prompts, expected, answers):
    got: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        rank = {"X-data-parallel-rank": str(number % 2)}
        regex = {"structured_outputs": {"regex": REGEX}}
        found = tokens(http, prompts[number], rank, max_tokens=20, temperature=0, **regex)
        assert found == answers[f"regex {number}"].token_ids
        got[number] = tokens(http, prompts[number], rank, max_tokens=40 + number, temperature=0)

    run_all([threading.Thread(target=ask, args=(number,)) for number in range(NUM_PROMPTS)])
    assert got == {number: expected[number][: 40 + number] for number in range(NUM_PROMPTS)}


def test_expert_group_idle_takes_no_steps(server, http, prompts):
    tokens(http, prompts[0], max_tokens=5, temperature=0)
    there = wait_until_whole(http, 2)
    pids = [server.child(label(rank, incarnation)) for rank, incarnation in there.items()]
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(2.0)  # what is measured is what happens in it
    used = [after - start for start, after in zip(before, map(cpu_seconds, pids), strict=True)]
    assert max(used) < 0.2, "idle engines compute"


def test_expert_group_random_requests_tokens_equal_one_engine(http, prompts, expected):
    random_load(http, prompts, expected, seconds=1.5, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_expert_group_random_requests_for_ten_minutes_equal_one_engine(http, prompts, expected):
    random_load(http, prompts, expected, seconds=600.0, seed=1)


def test_expert_group_killed_engine_costs_a_pause(server, http, prompts, expected):
    there = wait_until_whole(http, 2)
    rank = 1
    with stream(http, prompts[0], rank=0) as survivor, stream(http, prompts[1], rank=rank) as hit:
        got = [next(survivor), next(hit)]
        os.kill(server.child(label(rank, there[rank])), signal.SIGKILL)
        got[0] += flat(survivor)
        got[1] += flat(hit)
    assert got == [expected[0], expected[1]]
    assert wait_until_whole(http, 2) == {**there, rank: there[rank] + 1}
    assert tokens(http, prompts[2], max_tokens=10, temperature=0) == expected[2][:10]


@pytest.mark.grid  # the tests above and below kill busy ones, whose group notices it in the same way
def test_expert_group_killed_idle_engine_is_waited_for(server, http, prompts, expected):
    there = wait_until_whole(http, 2)
    with stream(http, prompts[3], rank=1) as events:
        got = next(events)
        os.kill(server.child(label(0, there[0])), signal.SIGKILL)
        got += flat(events)
    assert got == expected[3]
    assert wait_until_whole(http, 2) == {**there, 0: there[0] + 1}


def test_expert_group_both_killed_requests_resume(server, http, prompts, expected):
    there = wait_until_whole(http, 2)
    with stream(http, prompts[0]) as one, stream(http, prompts[1]) as two:
        got = [next(one), next(two)]
        for rank, incarnation in there.items():
            os.kill(server.child(label(rank, incarnation)), signal.SIGKILL)
        got[0] += flat(one)
        got[1] += flat(two)
    assert got == [expected[0], expected[1]]
    assert wait_until_whole(http, 2) == {rank: incarnation + 1 for rank, incarnation in there.items()}


def test_expert_group_waiting_request_can_be_aborted(server, http, prompts, expected):
    there = wait_until_whole(http, 2)
    with stream(http, prompts[0], rank=0) as events:
        next(events)
        os.kill(server.child(label(1, there[1])), signal.SIGKILL)
    assert tokens(http, prompts[0], max_tokens=10, temperature=0) == expected[0][:10]
    wait_until_whole(http, 2)


def test_expert_group_metrics_report_expert_load(http, prompts):
    tokens(http, prompts[0], max_tokens=5, temperature=0)
    wait_until_whole(http, 2)
    deadline = time.monotonic() + SECONDS
    while not any(name.startswith("eagleray:expert_tokens_total") and value for name, value in metrics(http).items()):
        assert time.monotonic() < deadline, "no expert has had a token"
        time.sleep(0.05)


def test_expert_group_scaled_streams_are_unchanged(server, http, prompts, expected):
    """A third engine is added, killed while it gets experts or soon after, and comes back; then the first one
    leaves."""
    wait_until_whole(http, 2)
    with streams_on_all(http, prompts, expected):
        begun = scale(http, data_parallel_size=3, operation_id="up", wait=False)
        assert (begun["phase"], begun["participating_ranks"]) == ("preparing", [0, 1])
        wait_for_log(server, "is formed anew, of the engines [0, 1, 2]")
        os.kill(server.child("engine-2"), signal.SIGKILL)
        assert scale(http, data_parallel_size=3, operation_id="up")["participating_ranks"] == [0, 1, 2]
        assert incarnations(http)[2] == 1
        found = tokens(http, prompts[3], {"X-data-parallel-rank": "2"}, max_tokens=20, temperature=0)
        assert found == expected[3][:20]
        assert scale(http, remove_ranks=[0])["participating_ranks"] == [1, 2]


@pytest.mark.grid  # tests/unit/models/test_rebalance.py tests groups of one engine, and what is read again
def test_expert_group_scaled_to_one_engine_and_back(server, http, prompts, expected):
    there = wait_until_whole(http, 2)
    (first, _), (last, incarnation) = there.items()
    scale(http, data_parallel_size=3)
    with stream(http, prompts[0], rank=first) as survivor:
        got = next(survivor)
        os.kill(server.child(label(last, incarnation)), signal.SIGKILL)
        assert got + flat(survivor) == expected[0]
    wait_until_whole(http, 3)
    with streams_on_all(http, prompts, expected):
        [rank] = scale(http, data_parallel_size=1)["participating_ranks"]
        os.kill(server.child(label(rank, incarnations(http)[rank])), signal.SIGKILL)
        scale(http, data_parallel_size=2)


@pytest.mark.grid  # tests/process has such groups
@pytest.mark.parametrize("dispatch", ["all-gather", "all-to-all"])
def test_expert_group_engines_with_several_workers_equal_one(checkpoint, prompts, expected, dispatch):
    options = ("--tensor-parallel-size", "2", "--expert-dispatch", dispatch)
    with serve(str(checkpoint), *TOGETHER, *options) as server, connect(server) as http:
        there = wait_until_whole(http, 2)
        for rank in (0, 1):
            got = tokens(http, prompts[2], {"X-data-parallel-rank": str(rank)}, max_tokens=20, temperature=0)
            assert got == expected[2][:20]
        with stream(http, prompts[0], rank=0) as events:
            got = next(events)
            os.kill(server.child(label(1, there[1])), signal.SIGKILL)
            got += flat(events)
        assert got == expected[0]
        assert wait_until_whole(http, 2) == {0: there[0], 1: there[1] + 1}
        with stream(http, prompts[1], rank=1) as events:
            got = next(events)
            scale(http, data_parallel_size=3)
            scale(http, remove_ranks=[0])
            assert got + flat(events) == expected[1]


@pytest.mark.grid  # test_draft_model.py has the tokens and log-probabilities of one engine
def test_expert_group_draft_model_of_each_engine_tokens_equal_one_engine(checkpoint, prompts, expected):
    """Engines propose in steps of their own choice. The draft model is the model itself, which each has whole."""
    drafts = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 3}
    options = ("--expert-dispatch", "all-to-all", "--speculative-config", json.dumps(drafts))
    with serve(str(checkpoint), *TOGETHER, *options) as server, connect(server) as http:
        there = wait_until_whole(http, 2)
        random_load(http, prompts, expected, seconds=3.0, seed=2)
        with stream(http, prompts[0], rank=0) as events:
            got = next(events)
            os.kill(server.child(label(1, there[1])), signal.SIGKILL)
            got += flat(events)
        assert got == expected[0]
        wait_until_whole(http, 2)
        with streams_on_all(http, prompts, expected):
            scale(http, data_parallel_size=3)
        name = "eagleray:spec_decode_num_accepted_tokens_total"
        assert sum(count for sample, count in metrics(http).items() if sample.startswith(name)) > 0


@contextlib.contextmanager
def streams_on_all(http: httpx.Client, prompts: list[list[int]], expected: list[list[int]]) -> Iterator[None]:
    """Keep streams running in the block, and check that each has all its tokens."""
    has_ended = threading.Event()

    def repeat(number: int) -> None:
        while not has_ended.is_set():
            with stream(http, prompts[number]) as events:
                assert flat(events) == expected[number]

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(repeat, number) for number in range(4)]
        try:
            yield
        finally:
            has_ended.set()
        for future in running:
            future.result()


def scale(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/scale", json=fields)
    assert response.status_code == (200 if fields.get("wait", True) else 202), response.text
    status: dict[str, Any] = response.json()
    return status


def wait_for_log(server: ServerProcess, text: str) -> None:
    deadline = time.monotonic() + SECONDS
    while text not in server.log:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.01)


def random_load(
    http: httpx.Client, prompts: list[list[int]], expected: list[list[int]], *, seconds: float, seed: int
) -> None:
    """Mix requests that are awaited, streams that are left in the middle, and idle pauses."""
    deadline = time.monotonic() + seconds
    wrong: list[str] = []

    def ask(rng: random.Random) -> None:
        while time.monotonic() < deadline:
            number, count = rng.randrange(NUM_PROMPTS), rng.choice((1, 2, 5, 30, 100))
            prompt, params = prompts[number], {"max_tokens": count, "temperature": 0}
            if rng.random() < 0.3:
                with contextlib.closing(stream_tokens(http, prompt, **params)) as events:
                    got = [token for _, event in zip(range(rng.randrange(3)), events, strict=False) for token in event]
                    if got != expected[number][: len(got)]:
                        wrong.append(f"{number}: {got}")
            elif (got := tokens(http, prompt, **params)) != expected[number][:count]:
                wrong.append(f"{number}: {got}")
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 0.3))  # so that engines fall idle, sometimes all of them

    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            ask(random.Random(seed * 1000 + number))
        except BaseException as error:
            failed.append(error)

    run_all([threading.Thread(target=run, args=(number,)) for number in range(4)], seconds + SECONDS)
    assert not failed, failed
    assert not wrong, wrong


def run_all(threads: list[threading.Thread], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a request hangs"


@contextlib.contextmanager
def stream(http: httpx.Client, prompt: list[int], *, rank: int | None = None) -> Iterator[Iterator[list[int]]]:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    with contextlib.closing(stream_tokens(http, prompt, headers, max_tokens=LONG, temperature=0)) as events:
        yield events


def flat(events: Iterator[list[int]]) -> list[int]:
    return [token_id for event in events for token_id in event]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK
