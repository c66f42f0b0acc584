"""`eagleray.serve` on a Ray cluster: streams through Serve's proxy, health, and the end of a replica."""

from __future__ import annotations

import os
import signal

import pytest
from checkpoints import make_checkpoint
from fleets import SECONDS, stream_tokens, tokens, wait_until_running, wait_until_whole
from processes import children_of
from serve_apps import deployed, engine_process, replica_pids
from serving import wait_until_gone

PROMPT = [5, 6, 7]
LONG = 1500
"""Number of tokens of a stream that is still running when a process is killed."""
OPTIONS = {"dtype": "float32", "max_model_len": 2048}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("serve_app"), "qwen3", max_position_embeddings=10_000))


def test_replica_killed_engine_resumes_the_stream_and_nothing_is_left(cluster, checkpoint):
    with deployed(checkpoint, **OPTIONS) as http:
        expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        (replica,) = replica_pids()
        events = stream_tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        got = next(events)
        wait_until_running(http)
        os.kill(engine_process(replica), signal.SIGKILL)
        for event in events:
            got += event
        assert got == expected
        assert wait_until_whole(http, 1) == {0: 1}
        assert replica_pids() == [replica]
        assert http.get("/ready").status_code == 200
        answer = http.get("/version", headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert http.post("/pause").status_code == 403, "a client of the proxy's host is not one of the replica's"
        there = [replica, *children_of(replica)]
    wait_until_gone(there, SECONDS)
