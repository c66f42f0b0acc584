"""The state of a running fleet, through its HTTP API and the system."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx

SECONDS = 60.0
POLL_SECONDS = 0.02


def connect(server: Any) -> httpx.Client:
    """Return a client that makes a connection for each request, so that any API server may answer."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=SECONDS, limits=limits, trust_env=False)


def tokens(http: httpx.Client, prompt: list[int], headers: dict[str, str] | None = None, **params: Any) -> list[int]:
    """Return the tokens that /inference/v1/generate answers."""
    body = {"token_ids": prompt, "sampling_params": {"ignore_eos": True, **params}}
    response = http.post("/inference/v1/generate", json=body, headers=headers)
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


def stream_tokens(
    http: httpx.Client, prompt: list[int], headers: dict[str, str] | None = None, **params: Any
) -> Generator[list[int], None, None]:
    """Yield the tokens of each event of a stream of /inference/v1/generate."""
    body = {"token_ids": prompt, "stream": True, "sampling_params": {"ignore_eos": True, **params}}
    with http.stream("POST", "/inference/v1/generate", json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    yield choice["token_ids"]
    raise AssertionError("the stream broke off")


def engines(http: httpx.Client) -> list[dict[str, Any]]:
    """Return the engines that are present, from /server_info."""
    found: list[dict[str, Any]] = http.get("/server_info").json()["engines"]
    return found


def incarnations(http: httpx.Client) -> dict[int, int]:
    """Return the incarnations of the engines that are present, by rank."""
    return {engine["rank"]: engine["incarnation"] for engine in engines(http)}


def wait_until_whole(http: httpx.Client, count: int) -> dict[int, int]:
    """Wait until all engines are present and idle. Returns their incarnations."""
    deadline = time.monotonic() + SECONDS
    while True:
        there = engines(http)
        loads = [engine["load"] for engine in there]
        if len(there) == count and all(load and load["num_running"] + load["num_waiting"] == 0 for load in loads):
            return incarnations(http)
        assert time.monotonic() < deadline, f"the fleet is not whole and idle: {there}"
        time.sleep(POLL_SECONDS)


def wait_until_running(http: httpx.Client) -> tuple[int, int]:
    """Wait for an engine that computes. Returns its rank and incarnation."""
    deadline = time.monotonic() + SECONDS
    while True:
        for engine in engines(http):
            if engine["load"] and engine["load"]["num_running"]:
                return engine["rank"], engine["incarnation"]
        assert time.monotonic() < deadline, "no engine computes"
        time.sleep(POLL_SECONDS)


def label(rank: int, incarnation: int) -> str:
    """Return the label of an engine."""
    return f"engine-{rank}" + (f".{incarnation}" if incarnation else "")


def metrics(http: httpx.Client) -> dict[str, float]:
    """Return every sample of /metrics."""
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def generated(http: httpx.Client) -> dict[int, float]:
    """Return the number of tokens that each engine has generated, by rank."""
    pattern = re.compile(r'eagleray:generation_tokens_total\{engine="(\d+)",.*\}')
    return {int(match[1]): value for name, value in metrics(http).items() if (match := pattern.fullmatch(name))}


def server_of(response: httpx.Response) -> int:
    """Return the process id of the API server of a response, whose connection must still be open."""
    host, port = response.extensions["network_stream"].get_extra_info("client_addr")[:2]
    inode = _inode_of_peer(port)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.readlink() == Path(f"socket:[{inode}]"):
                return int(link.parts[2])
        except OSError:  # it was closed meanwhile
            continue
    raise AssertionError(f"no process has the connection from {host}:{port}")


def _inode_of_peer(port: int) -> str:
    """Return the inode of the socket that is connected to `port` of this process."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == port:
            return fields[9]
    raise AssertionError(f"there is no connection from port {port}")
