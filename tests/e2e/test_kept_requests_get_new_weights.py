"""Weights come by shared memory while 64 requests are kept: all finish, and say which weights made which tokens."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest
from checkpoints import make_checkpoint
from fleets import SECONDS, server_of, wait_until_whole
from oracle import oracle
from safetensors.torch import load_file
from serving import serve

from eagleray.weights import SharedMemorySender

NUM_REQUESTS = 64
COUNT = 300
"""Tokens of a request."""
NUM_CALLS = 3
"""Calls in which the weights come."""

TWO_ENGINES = ("--data-parallel-size", "2")
CASES = [
    pytest.param("qwen3", TWO_ENGINES, id="engines"),
    pytest.param("qwen3", (*TWO_ENGINES, "--tensor-parallel-size", "2"), id="tp", marks=pytest.mark.grid),
    pytest.param("qwen3", (*TWO_ENGINES, "--pipeline-parallel-size", "2"), id="pp", marks=pytest.mark.grid),
    pytest.param("qwen3_moe", (*TWO_ENGINES, "--enable-expert-parallel"), id="experts", marks=pytest.mark.grid),
]


@dataclass
class Streamed:
    """A request, and what has come of its answer."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    versions: list[dict] = field(default_factory=list)
    has_begun: threading.Event = field(default_factory=threading.Event)

    def run(self, http: httpx.Client) -> None:
        params = {"max_tokens": COUNT, "ignore_eos": True, "temperature": 0.0}
        body = {"token_ids": self.prompt, "stream": True, "sampling_params": params}
        with http.stream("POST", "/inference/v1/generate", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        self.token_ids += choice["token_ids"]
                        self.versions = choice.get("weight_versions") or self.versions
                        self.has_begun.set()

    @property
    def num_old(self) -> int:
        """Number of tokens of the checkpoint's weights."""
        return self.versions[0]["end"] if self.versions[0]["version"] == "default" else 0


@contextlib.contextmanager
def clients_of_two_servers(url):
    """Yield a client for each of the two API servers, which keeps its connection."""
    with contextlib.ExitStack() as stack:
        clients: dict[int, httpx.Client] = {}
        while len(clients) < 2:
            http = stack.enter_context(httpx.Client(base_url=url, timeout=SECONDS, trust_env=False))
            with http.stream("GET", "/live") as response:
                clients.setdefault(server_of(response), http)
                response.read()
        yield list(clients.values())


def call(http, path, body=None):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def push(http, weights, version):
    """Push the weights by shared memory, in several calls."""
    with SharedMemorySender() as sender:
        call(http, "/start_weight_update")
        for first in range(NUM_CALLS):
            call(http, "/update_weights", {"update_info": sender.write(weights[first::NUM_CALLS])})
        assert call(http, "/finish_weight_update", {"weight_version": version})["num_missing"] == 0


@pytest.mark.parametrize(("family", "options"), CASES)
def test_update_with_64_requests_kept_none_is_lost_and_spans_are_right(tmp_path, family, options):
    """The cache of kept requests is computed again, so that the new weights alone determine the later tokens."""
    paths = [make_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (0, 1)]
    weights = list(load_file(paths[1] / "model.safetensors").items())
    arguments = ("--dtype", "float32", "--api-server-count", "2", *options)
    with serve(str(paths[0]), *arguments) as server, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        url = server.url.removesuffix("/v1")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        with (
            httpx.Client(base_url=url, timeout=SECONDS, limits=limits, trust_env=False) as http,
            clients_of_two_servers(url) as (one, other),
        ):
            wait_until_whole(http, 2)
            requests = [Streamed([5 + index % 7, 6, 20 + index]) for index in range(NUM_REQUESTS)]
            running = [pool.submit(request.run, http) for request in requests]
            for request in requests:
                assert request.has_begun.wait(SECONDS)
            assert call(one, "/pause?mode=keep")["num_kept"] > 0
            push(one, weights, "new")
            call(other, "/reset_prefix_cache?reset_running_requests=true")
            late = Streamed([9, 9, 9])
            running.append(pool.submit(late.run, http))
            call(other, "/resume")
            for future in running:
                future.result(SECONDS)
    check(requests, late, paths)
    assert server.process.returncode == 0, server.log


def check(requests, late, paths):
    old, new = (oracle(path) for path in paths)
    for request in requests:
        assert len(request.token_ids) == COUNT
        assert [(span["version"], span["start"], span["end"]) for span in request.versions] in (
            [("default", 0, COUNT)],
            [("default", 0, request.num_old), ("new", request.num_old, COUNT)],
            [("new", 0, COUNT)],
        )
        before, after = request.token_ids[: request.num_old], request.token_ids[request.num_old :]
        if before:
            old.assert_greedy(request.prompt, before)
        if after:
            new.assert_greedy([*request.prompt, *before], after)
    assert any(0 < request.num_old < COUNT for request in requests)
    assert late.versions == [{"version": "new", "start": 0, "end": COUNT}]
    new.assert_greedy(late.prompt, late.token_ids)
