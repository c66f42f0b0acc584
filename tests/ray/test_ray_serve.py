"""`eagleray serve` whose engines are Ray actors: its streams survive kills of engines, driver and cluster."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_cluster
from checkpoints import make_checkpoint
from fleets import SECONDS, connect, label, stream_tokens, tokens, wait_until_running, wait_until_whole
from grammar_walks import schema_errors
from processes import children_of
from ray_cluster import ACC
from serving import ServerProcess, serve, wait_until_gone
from tokenizers import Tokenizer

PROMPT = [5, 6, 7]
LONG = 1500
"""Number of tokens of a stream that is still running when a process is killed."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("serve"), "qwen3", max_position_embeddings=10_000))


@pytest.fixture(params=["ray", pytest.param("in-process", marks=pytest.mark.grid)])
def server(cluster: str, checkpoint: str, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """Serve with two engines on two nodes, whose workers are actors too, or part of the engines."""
    ray = ("--ray-address", cluster, "--ray-worker-resources", json.dumps(ACC))
    fleet = ("--data-parallel-backend", "ray", "--data-parallel-size", "2", "--api-server-count", "2")
    more = ("--ray-engine-placement", "strict-spread", "--executor", request.param)
    model = (checkpoint, "--dtype", "float32", "--max-model-len", "2048", "--num-kv-blocks", "512")
    with serve(*model, *ray, *fleet, *more) as server:
        yield server
    assert server.process.returncode in (0, -signal.SIGKILL), server.log


def process_of(name: str) -> int:
    """Return the process of the actor with that label."""
    (full,) = [entry["Name"] for entry in ray_cluster.living_actors() if entry["Name"].endswith(f"/{name}")]
    return ray_cluster.pid_of(full)


def test_serve_killed_engine_resumes_its_streams(server: ServerProcess) -> None:
    with connect(server) as http:
        wait_until_whole(http, 2)
        expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        there = wait_until_whole(http, 2)
        events = stream_tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        got = next(events)
        rank, incarnation = wait_until_running(http)
        os.kill(process_of(label(rank, incarnation)), signal.SIGKILL)
        for event in events:
            got += event
        assert got == expected
        assert wait_until_whole(http, 2) == {**there, rank: incarnation + 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 110, "maxItems": 110}},
        {"regex": r"([a-z]{3,8} ){160}[a-z]{3,8}\."},
    ],
    ids=["json", "regex"],
)
def test_serve_killed_engine_resumes_its_constrained_stream(
    server: ServerProcess, checkpoint: str, constraint: dict[str, Any]
) -> None:
    params = {"structured_outputs": constraint | {"disable_any_whitespace": True}, "seed": 3, "ignore_eos": False}
    with connect(server) as http:
        there = wait_until_whole(http, 2)
        expected = tokens(http, PROMPT, max_tokens=LONG, **params)
        text = Tokenizer.from_file(str(Path(checkpoint) / "tokenizer.json")).decode(expected)
        if "regex" in constraint:
            assert re.fullmatch(constraint["regex"], text)
        else:
            assert schema_errors(constraint["json"], text) == []
        wait_until_whole(http, 2)
        events = stream_tokens(http, PROMPT, max_tokens=LONG, **params)
        got = next(events)
        rank, incarnation = wait_until_running(http)
        os.kill(process_of(label(rank, incarnation)), signal.SIGKILL)
        for event in events:
            got += event
        assert got == expected
        assert wait_until_whole(http, 2) == {**there, rank: incarnation + 1}


@pytest.mark.slow  # test_ray_engines.py kills the driver
def test_serve_killed_ray_driver_resumes_its_streams_and_killed_supervisor_leaves_nothing(
    server: ServerProcess,
) -> None:
    """Every engine exits with the driver, and requests wait for the replacements. Fixtures check actors and placement
    groups after the supervisor's end."""
    with connect(server) as http:
        there = wait_until_whole(http, 2)
        expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        events = stream_tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        got = next(events)
        (driver,) = [pid for pid in server.children if b"ray-driver" in command_line(pid)]
        os.kill(driver, signal.SIGKILL)
        for event in events:
            got += event
        assert got == expected
        assert wait_until_whole(http, 2) == {rank: incarnation + 1 for rank, incarnation in there.items()}
    actors = [entry["Pid"] for entry in ray_cluster.living_actors()]
    processes = [*actors, *server.children]
    directories = [path for pid in processes for path in sockets_of(pid)]
    assert directories
    server.process.kill()
    wait_until_gone(processes, SECONDS)
    assert ray_cluster.wait_until(lambda: not any(path.exists() for path in directories), SECONDS)


@pytest.mark.parametrize(
    ("backend", "victim"),
    [
        pytest.param("ray", "raylet", marks=pytest.mark.slow),  # test_ray_connect.py ends such a cluster
        pytest.param("ray", "gcs_server", marks=pytest.mark.grid),
        pytest.param("processes", "raylet", marks=pytest.mark.grid),
        pytest.param("processes", "gcs_server", marks=pytest.mark.grid),
    ],
)
def test_serve_local_cluster_that_dies_is_replaced_and_streams_resume(
    checkpoint: str, backend: str, victim: str
) -> None:
    options = ("--ray-address", "local", "--data-parallel-backend", backend, "--executor", "ray")
    model = (checkpoint, "--dtype", "float32", "--max-model-len", "2048", "--num-kv-blocks", "512")
    with serve(*model, *options) as server, connect(server) as http:
        expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        events = stream_tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        got = next(events)
        (pid,) = [pid for pid in descendants(server.process.pid) if name_of(pid) == victim]
        os.kill(pid, signal.SIGKILL)
        server.wait_for("the Ray cluster that was started on this host is lost", 10.0)
        for event in events:
            got += event
        assert got == expected
        there = descendants(server.process.pid)
    wait_until_gone(there, SECONDS)


def descendants(pid: int) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *descendants(child))]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def sockets_of(pid: int) -> list[Path]:
    """Return the directories of our Unix sockets at which a process listens."""
    inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = [Path(fields[7]) for fields in lines if len(fields) > 7 and f"socket:[{fields[6]}]" in inodes]
    return [path.parent for path in paths if path.parent.name.startswith("eagleray-")]


def command_line(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
