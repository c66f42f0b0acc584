"""Engines that share experts and are Ray actors, on two nodes and on one: their tokens equal those of one engine, also
after one was killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_cluster
from checkpoints import make_checkpoint
from fleets import connect, label, stream_tokens, tokens, wait_until_whole
from harness import LocalEngine
from ray_cluster import ACC
from serving import ServerProcess, serve

PROMPT = [5, 6, 7]
LONG = 300
"""Number of tokens of a stream that is still running when an engine is killed."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3_moe")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    with LocalEngine(checkpoint, dtype="float32") as engine:
        engine.add("a", PROMPT, max_tokens=LONG)
        return engine.run()["a"].token_ids


@pytest.fixture(params=["strict-spread", pytest.param("pack", marks=pytest.mark.grid)])
def server(cluster: str, checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """Serve with two engines: on two connected nodes, or on one node that has memory for both."""
    ray = ("--ray-address", cluster, "--ray-worker-resources", json.dumps(ACC))
    fleet = ("--data-parallel-backend", "ray", "--data-parallel-size", "2", "--enable-expert-parallel")
    where = ("--ray-engine-placement", request.param)
    model = (str(checkpoint), "--dtype", "float32", "--max-model-len", "1024", "--num-kv-blocks", "128")
    with serve(*model, *ray, *fleet, *where) as server:
        yield server
    assert server.process.returncode == 0, server.log


def test_expert_parallel_ray_engines_answer_as_one_engine_also_after_a_kill(
    server: ServerProcess, expected: list[int]
) -> None:
    with connect(server) as http:
        there = wait_until_whole(http, 2)
        for rank in (0, 1):
            headers = {"X-data-parallel-rank": str(rank)}
            assert tokens(http, PROMPT, headers, max_tokens=20, temperature=0) == expected[:20]
        events = stream_tokens(http, PROMPT, {"X-data-parallel-rank": "0"}, max_tokens=LONG, temperature=0)
        got = next(events)
        os.kill(process_of(label(1, there[1])), signal.SIGKILL)
        for event in events:
            got += event
        assert got == expected
        assert wait_until_whole(http, 2) == {0: there[0], 1: there[1] + 1}


def process_of(name: str) -> int:
    """Return the process of the actor with that label."""
    (full,) = [entry["Name"] for entry in ray_cluster.living_actors() if entry["Name"].endswith(f"/{name}")]
    return ray_cluster.pid_of(full)
