"""Several API servers on one listening socket: the exit of one does not affect the others."""

from __future__ import annotations

import queue
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest

from eagleray.config.build import build_config
from eagleray.identity import ClientId
from eagleray.log import LogSettings
from eagleray.messages.codec import Codec
from eagleray.messages.lifecycle import ApiServerSpec, Attach, Bound, Stop, SupervisorToMember
from eagleray.messages.wires import SUPERVISOR_OUTBOX
from eagleray.process.spawn import Child
from eagleray.transport.inbox import Outbox

SECONDS = 30.0


class Server:
    """An API server of the demo model, without an engine."""

    def __init__(self, runtime_dir, listener, client: ClientId, target: str) -> None:
        self.client = client
        spec = ApiServerSpec(client, build_config(api_server_count=2), str(runtime_dir), listener.fileno())
        self.reports: queue.Queue = queue.Queue()
        self.process = Child(
            target=target,
            member=client,
            payload=msgspec.msgpack.encode(spec),
            log=LogSettings(level="warning"),
            runtime_dir="/nonexistent",
            on_message=self.reports.put,
            on_exit=lambda cause: self.reports.put(cause.message),
            pass_fds=[listener.fileno()],
        )

    def attach(self) -> str:
        """Attach the server, which serves from then on. Returns its address."""
        bound = self.reports.get(timeout=SECONDS)
        assert isinstance(bound, Bound), bound
        outbox: Outbox = Outbox(Codec[SupervisorToMember](SUPERVISOR_OUTBOX).encode)
        outbox.connect(self.client, bound.address)
        outbox.send(self.client, Attach(self.client, "ipc:///nowhere", []))
        outbox.close()
        return bound.address


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def start(runtime_dir, listener):
    """A function that starts the server of an index."""
    servers = []

    def start(index: int, incarnation: int = 0, target: str = "eagleray.server.entry:run") -> Server:
        servers.append(Server(runtime_dir, listener, ClientId("test", index, incarnation), target))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        assert server.process.wait(SECONDS)


@pytest.fixture
def get(listener):
    """A function that sends a request over a connection of its own: whichever server takes it answers."""
    host, port = listener.getsockname()
    return lambda path: httpx.get(f"http://{host}:{port}{path}", timeout=SECONDS)


def answered(get, route):
    """Return the number of requests that all servers have answered, from the metrics of one."""
    pattern = rf'^eagleray:http_requests_total{{method="GET",route="{route}",status="200"}} (\S+)$'
    found = re.search(pattern, get("/metrics").text, re.MULTILINE)
    return 0 if found is None else float(found[1])


def test_api_server_killed_others_keep_port_and_counts(start, get):
    first, second = start(0), start(1)
    first.attach()
    second.attach()
    assert {get("/live").status_code for _ in range(20)} == {200}
    assert answered(get, "/live") == 20
    first.process.kill()
    assert "SIGKILL" in first.reports.get(timeout=SECONDS)
    assert {get("/live").status_code for _ in range(20)} == {200}
    assert answered(get, "/live") == 40
    start(0, incarnation=1).attach()
    second.process.kill()
    assert "SIGKILL" in second.reports.get(timeout=SECONDS)
    assert {get("/live").status_code for _ in range(20)} == {200}
    assert answered(get, "/live") == 60


def answer_from(connection: socket.socket) -> bytes:
    """Return the answer of `/live`."""
    answer = b""
    while b'"ok"}' not in answer:
        answer += (received := connection.recv(4096))
        assert received, answer
    return answer


def test_api_server_leaves_answers_requests_on_their_way(start, get, listener):
    """Scaling down refuses nobody: connections that were accepted get their answer, new ones go to the others."""
    first = start(0)
    address = first.attach()
    with ExitStack() as stack:
        outbox: Outbox = Outbox(Codec[SupervisorToMember](SUPERVISOR_OUTBOX).encode)
        stack.callback(outbox.close)
        fresh, idle = (stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(2))
        request = b"GET /live HTTP/1.1\r\nHost: here\r\n\r\n"
        idle.settimeout(SECONDS)
        fresh.settimeout(SECONDS)
        idle.sendall(request)
        assert b"200" in answer_from(idle)
        outbox.connect("first", address)
        outbox.send("first", Stop(SECONDS, others_stay=True))
        assert idle.recv(4096) == b""
        start(1).attach()
        assert {get("/live").status_code for _ in range(5)} == {200}
        fresh.sendall(request)
        answer = answer_from(fresh)
        assert b"200" in answer and b"connection: close" in answer
        assert first.reports.get(timeout=SECONDS) == "it ended with exit code 0"


def test_api_server_stopped_others_keep_port(start, get):
    first, second = start(0), start(1)
    addresses = [first.attach(), second.attach()]
    outbox: Outbox = Outbox(Codec[SupervisorToMember](SUPERVISOR_OUTBOX).encode)
    try:
        outbox.connect("first", addresses[0])
        outbox.send("first", Stop(0.0))
        assert first.reports.get(timeout=SECONDS) == "it ended with exit code 0"
    finally:
        outbox.close()
    assert {get("/live").status_code for _ in range(20)} == {200}
    assert get("/ready").status_code == 503
    page = get("/metrics").text
    assert re.findall(r'^process_open_fds{server="(\d)"}', page, re.MULTILINE) == ["1"], (
        "metrics of a process that has exited"
    )


def test_api_server_terminated_while_it_reads_exits_quietly(start, get, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    server = start(0, target="api_server_children:exit_while_reading")
    server.attach()
    with pytest.raises(httpx.RemoteProtocolError):
        get("/live")
    assert server.reports.get(timeout=SECONDS) == "it ended with exit code 143"
    assert capfd.readouterr().err == ""
