"""Fleets of null engines and real API servers: started, asked, stopped, many times, several at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from checkpoints import make_checkpoint
from null_engine import token
from processes import children_of

from eagleray.config.build import build_config
from eagleray.fleet.replica import Replica, Up
from eagleray.fleet.supervisor import Supervisor

SECONDS = 60.0
PROMPT = [5, 6, 7]
AT_ONCE = 3


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path_factory):
    """Check that no process and no directory is left."""
    before = children()
    tmp_path_factory.getbasetemp()  # else pytest would make it in our directory
    with tempfile.TemporaryDirectory(prefix="er-") as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield
        assert list(Path(directory).iterdir()) == []
    assert children() == before


def children() -> list[int]:
    return children_of(os.getpid())


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Fleet:
    """Engines and API servers, as a context manager."""

    def __init__(self, engines: int, api_servers: int, *, engine_target: str = "null_engine:run", **options) -> None:
        self._engine_target = engine_target
        self._config = build_config(
            data_parallel_size=engines, api_server_count=api_servers, **{"log_level": "warning", **options}
        )

    async def __aenter__(self) -> Fleet:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.supervisor = await Supervisor.open(self._config, engine_target=self._engine_target)
        self.supervisor.start_engines()
        self.supervisor.start_api_servers(self._listener.fileno())
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self._listener.getsockname()[1]}",
            timeout=SECONDS,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )
        try:
            await self.first(self.supervisor.serving.wait())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
        await self.supervisor.stop(0.0)
        self._listener.close()

    async def first(self, work):
        """Return the result of `work`, or raise the failure of the instance if that comes first."""
        task = asyncio.ensure_future(work)
        async with asyncio.timeout(SECONDS):
            await asyncio.wait([task, self.supervisor.failed], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self.supervisor.failed.result()
        return await task

    async def tokens(self, max_tokens: int, **sampling) -> list[int]:
        body = {
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": max_tokens, "ignore_eos": True, **sampling},
        }
        response = await self.first(self._http.post("/inference/v1/generate", json=body))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    def pid(self, index: int) -> int:
        """Return the process id of a replica; engines come first."""
        return self.supervisor._spawned[self.replicas[index].member].pid

    @property
    def replicas(self) -> list[Replica]:
        return list(self.supervisor._state._replicas.values())

    async def until(self, condition) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.01)


SETTLE_SECONDS = 5.0


def expected(count: int) -> list[int]:
    return [token(PROMPT, position) for position in range(count)]


async def start_ask_and_stop(engines: int, api_servers: int) -> None:
    async with Fleet(engines, api_servers) as fleet:
        assert await fleet.tokens(5) == expected(5)


def rounds(count: int) -> None:
    """Start and stop fleets, at least `count` of them, and check that no descriptor is left open."""
    assert count >= AT_ONCE, "else nothing would run after the first measurement"

    async def several() -> None:
        await asyncio.gather(*(start_ask_and_stop(2, 2) for _ in range(AT_ONCE)))

    asyncio.run(several())  # the first run opens what a process opens once
    before = num_descriptors()
    for _ in range(count // AT_ONCE):
        asyncio.run(several())
    deadline = time.monotonic() + SETTLE_SECONDS  # a thread of zmq closes descriptors of closed sockets
    while num_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert num_descriptors() <= before


GRABBER = """
import random, socket, sys
held = []
while True:
    one = socket.socket()
    try:
        one.bind(("127.0.0.1", random.choice([0, random.randrange(1024, 65536)])))
        one.listen()
    except OSError:
        one.close()
        continue
    held.append(one)
    if len(held) > 200:
        held.pop(random.randrange(len(held))).close()
    if random.random() < 0.1:
        __import__("time").sleep(0.001)
"""
"""Program that binds ports, both free ones that the system offers and random ones, and releases them soon."""


@pytest.fixture
def port_grabber():
    with subprocess.Popen([sys.executable, "-c", GRABBER]) as process:
        yield
        assert process.poll() is None, "it has ended by itself"
        process.kill()


def test_supervisor_start_and_stop_repeatedly_leaves_nothing():
    rounds(AT_ONCE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_supervisor_start_and_stop_500_times_leaves_nothing(port_grabber):
    rounds(500)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_supervisor_start_and_stop_20_times_with_model_gives_equal_tokens(tmp_path, port_grabber):
    checkpoint = make_checkpoint(tmp_path, "qwen3")

    async def start_ask_and_stop() -> list[int]:
        options = {"model": str(checkpoint), "num_threads": 1, "num_kv_blocks": 64}
        async with Fleet(2, 2, engine_target="eagleray.engine.entry:run", **options) as fleet:
            return await fleet.tokens(5, temperature=0.0)

    async def scenario():
        first = await start_ask_and_stop()
        for _ in range(19):
            assert await start_ask_and_stop() == first

    asyncio.run(scenario())


def test_supervisor_sixteen_engines_serve():
    asyncio.run(start_ask_and_stop(16, 1))


def test_supervisor_stop_during_start_leaves_nothing():
    async def scenario():
        for seconds in (0.0, 0.1, 0.3):
            supervisor = await Supervisor.open(
                build_config(data_parallel_size=2, log_level="warning"), engine_target="null_engine:run"
            )
            with socket.create_server(("127.0.0.1", 0)) as listener:
                supervisor.start_engines()
                supervisor.start_api_servers(listener.fileno())
                await asyncio.sleep(seconds)
                await supervisor.stop(0.0)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.grid)])
def test_supervisor_each_process_killed_or_stopped_is_replaced(how):
    """Processes fail one after another while requests run. Requests of a failed API server are sent again."""

    async def scenario():
        async with Fleet(2, 2, heartbeat_timeout=1.0) as fleet:
            for index in range(4):
                asked = [asyncio.create_task(ask_again(fleet, 400)) for _ in range(6)]
                await asyncio.sleep(0.1)
                pid = fleet.pid(index)
                os.kill(pid, how)
                assert await asyncio.gather(*asked) == [expected(400)] * 6
                replicas = fleet.replicas
                # a stopped process is noticed a second later, perhaps after the others have answered everything
                await fleet.until(lambda: replicas[index].member.incarnation == 1)  # noqa: B023
                await fleet.until(lambda: all(isinstance(replica.state, Up) for replica in replicas))  # noqa: B023
                assert await fleet.tokens(5) == expected(5)

    asyncio.run(scenario())


async def ask_again(fleet: Fleet, count: int) -> list[int]:
    while True:
        try:
            return await fleet.tokens(count)
        except (httpx.RemoteProtocolError, httpx.ReadError):
            pass  # the API server was killed


@pytest.mark.grid
def test_supervisor_all_engines_killed_twice_requests_finish():
    async def scenario():
        async with Fleet(2, 1) as fleet:
            asked = [asyncio.create_task(fleet.tokens(2000)) for _ in range(4)]
            for incarnation in (1, 2):
                await asyncio.sleep(0.2)
                for index in range(2):
                    os.kill(fleet.pid(index), signal.SIGKILL)
                replicas = fleet.replicas[:2]
                await fleet.until(
                    lambda: all(s.member.incarnation == incarnation and isinstance(s.state, Up) for s in replicas)  # noqa: B023
                )
            assert await asyncio.gather(*asked) == [expected(2000)] * 4

    asyncio.run(scenario())
