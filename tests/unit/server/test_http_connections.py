"""The limit of connections, the reserve beyond it, and the turns of servers that accept from one socket."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import Counter
from contextlib import closing

import pytest
from http_fakes import HttpServer, request

from eagleray.config.build import build_config
from eagleray.errors import ConfigError
from eagleray.server.acceptor import Acceptor, ConnectionCounts, Published, Turns
from eagleray.server.connection_limit import connection_limit
from eagleray.server.connections import RESERVED_CONNECTIONS


@pytest.fixture
def make_server():
    with asyncio.Runner() as runner:
        yield lambda **options: HttpServer(runner, **options)


def busy(server):
    """Return a connection whose answer is not complete."""
    connection = server.connect()
    connection.send(request("/stream"))
    return connection


def test_connections_at_the_limit_close_the_longest_waiting(make_server, caplog):
    server = make_server(max_connections=3)
    working, first, second = busy(server), server.connect(), server.connect()
    second.send(request())
    first.send(b"GET / HT")
    assert not server.connect().is_within_limit, "their requests may be on the way"
    server.pass_time(1.5)
    third = server.connect()
    assert first.transport.is_closed
    assert working.is_open
    assert second.is_open
    third.send(request())
    assert third.answer().status == 200
    assert "3 connections are open, the most that option `max_connections` allows" in caplog.text


def test_connections_beyond_the_limit_show_the_state_alone(make_server):
    server = make_server(max_connections=2)
    streams = [busy(server), busy(server)]
    live, other = server.connect(), server.connect()
    assert (live.is_within_limit, other.is_within_limit) == (False, False)
    live.send(request("/live"))
    assert live.answer().headers["connection"] == "close"
    other.send(request("/v1/completions", body=b"{}", method="POST"))
    answer = other.answer()
    assert answer.status == 503
    assert "all 2 connections" in answer.error["message"]
    assert int(answer.headers["retry-after"]) > 0
    streams[0].lose()
    assert server.connect().is_within_limit


def test_connections_beyond_the_limit_have_less_time(make_server):
    server = make_server(max_connections=1)
    busy(server)
    silent, slow = server.connect(), server.connect()
    slow.send(b"GET /live")
    server.pass_time(6.0)
    assert silent.transport.is_closed
    assert slow.answer().status == 408


def test_connections_when_the_reserve_is_full_drop_the_oldest(make_server):
    server = make_server(max_connections=1)
    busy(server)
    reserved = [server.connect() for _ in range(RESERVED_CONNECTIONS + 1)]
    assert reserved[0].transport.is_closed
    reserved[-1].send(request("/live"))
    assert reserved[-1].answer().status == 200


def test_connections_at_the_limit_warn_once(make_server, caplog):
    server = make_server(max_connections=1)
    for _ in range(100):
        server.connect()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("wanted", "open_files", "limit"), [(None, 65536, 8192), (None, 1024, 512), (None, 64, 32), (500, 1024, 500)]
)
def test_connection_limit_leaves_files_for_others(wanted, open_files, limit):
    assert (
        connection_limit(build_config(max_connections=wanted).serving.max_connections, open_files=open_files) == limit
    )


def test_connection_limit_beyond_the_open_files_is_refused():
    with pytest.raises(ConfigError, match=r"`max_connections`: 1000 were asked for, .* 1024 open files, .* keep 512"):
        connection_limit(build_config(max_connections=1000).serving.max_connections, open_files=1024)


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def counts(tmp_path, clock):
    """The counts of three servers."""
    made = [ConnectionCounts(tmp_path / "connections", server=server, clock=lambda: clock[0]) for server in range(3)]
    yield made
    for one in made:
        one.close()


def test_least_of_others_counts_only_servers_that_accept(counts, clock):
    first, second, third = counts
    assert first.least_of_others() is None
    first.set(0)
    second.set(7)
    assert first.least_of_others().num_connections == 7
    third.set(5)
    assert [one.least_of_others().num_connections for one in counts] == [5, 0, 0]
    clock[0] += 2.0
    first.set(9)
    clock[0] += 2.0
    assert first.least_of_others() is None, "the others are stuck or dead"
    assert second.least_of_others().num_connections == 9
    first.withdraw()
    assert second.least_of_others() is None


def test_connection_counts_of_a_replacement_start_anew(counts, tmp_path, clock):
    counts[0].set(40)
    with closing(ConnectionCounts(tmp_path / "connections", server=0, clock=lambda: clock[0])) as new:
        assert counts[1].least_of_others() is None
        new.set(0)
        assert counts[1].least_of_others().num_connections == 0


def test_connection_counts_of_added_servers_are_seen_by_the_others(tmp_path, clock):
    """The last index is used again."""

    def open_counts(server):
        return ConnectionCounts(tmp_path / "connections", server=server, clock=lambda: clock[0])

    with closing(open_counts(0)) as first:
        first.set(3)
        assert first.least_of_others() is None
        for count in (1, 2):
            with closing(open_counts(5)) as added, closing(open_counts(2)) as other:
                other.set(4)
                assert (first.least_of_others().num_connections, added.least_of_others().num_connections) == (4, 3)
                added.set(count)
                assert (first.least_of_others().num_connections, other.least_of_others().num_connections) == (
                    count,
                ) * 2
            assert first.least_of_others() is None


def accepted_at(turns, own, other, *, until):
    """Return the times, in ms, at which connections are accepted of which there are more than enough."""
    times, now = [], 0
    while now <= until:
        if turns.may_accept(own + len(times), other, now / 1000):
            times.append(now)
        else:
            now += 2
    return times


def test_turns_server_with_the_fewest_accepts_at_once():
    turns = Turns()
    assert [turns.may_accept(own, Published(10, 1.0), 0.0) for own in (9, 10, 11)] == [True, True, False]
    assert turns.may_accept(106, Published(100, 2.0), 0.0)
    assert not turns.may_accept(107, Published(100, 2.0), 0.0)


def test_turns_server_accepts_twice_as_many_each_time_that_the_other_leaves_one():
    times = Counter(accepted_at(Turns(), 10, Published(0, 1.0), until=120))
    assert list(times.values())[:5] == [1, 2, 4, 8, 16]
    assert min(times) >= 20


def test_turns_server_waits_again_when_the_other_has_published():
    turns = Turns()
    assert len(accepted_at(turns, 10, Published(0, 1.0), until=100)) >= 15
    times = Counter(accepted_at(turns, 30, Published(1, 2.0), until=60))
    assert list(times.values())[:2] == [1, 2]
    assert min(times) >= 20


class AnyCertificates:
    """Certificates for handshakes that no client begins."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


class Servers:
    """Acceptors of one listening socket, in one event loop."""

    def __init__(self, runner, listener, counts, certificates=None) -> None:
        self.servers = [HttpServer(runner) for _ in counts]
        self._runner = runner
        self._clients: list[socket.socket] = []
        self._duplicates: list[socket.socket] = []
        self.listener = listener

        async def start() -> None:
            self.acceptors = [
                Acceptor(
                    self._duplicate(),
                    make_protocol=server.protocol,
                    connections=server.connections,
                    counts=one,
                    certificates=certificates,
                )
                for server, one in zip(self.servers, counts, strict=True)
            ]
            for acceptor in self.acceptors:
                acceptor.start()

        runner.run(start())

    def _duplicate(self) -> socket.socket:
        """Return another descriptor of the same socket, because an event loop takes each only once."""
        self._duplicates.append(self.listener.dup())
        return self._duplicates[-1]

    @property
    def counts(self) -> list[int]:
        return [len(server.connections) for server in self.servers]

    def connect(self, number: int) -> None:
        """Open `number` connections at once, and wait until they are accepted."""
        for _ in range(number):
            client = socket.socket(self.listener.family)
            client.connect(self.listener.getsockname())
            self._clients.append(client)

        async def accepted() -> None:
            async with asyncio.timeout(10):
                while sum(self.counts) < len(self._clients):
                    await asyncio.sleep(0.001)

        self._runner.run(accepted())

    def close(self) -> None:
        for client in self._clients:
            client.close()

        async def end() -> None:
            for acceptor in self.acceptors:
                acceptor.close()
            async with asyncio.timeout(10):
                while any(self.counts):
                    await asyncio.sleep(0.001)

        self._runner.run(end())
        for listener in self._duplicates:
            listener.close()


@pytest.fixture
def make_servers(tmp_path):
    """A function that starts servers; only the indices in `accepting` have an acceptor."""
    with (
        asyncio.Runner() as runner,
        socket.create_server(("127.0.0.1", 0), backlog=200) as port,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(str(tmp_path / "s"))
        unix.listen(200)
        started = []
        opened = []

        def make(accepting, num_servers, kind="port"):
            counts = [ConnectionCounts(tmp_path / "connections", server=index) for index in range(num_servers)]
            opened.extend(counts)
            servers = Servers(
                runner,
                unix if kind == "unix" else port,
                [counts[index] for index in accepting],
                AnyCertificates() if kind == "https" else None,
            )
            started.append(servers)
            return servers, counts

        yield make
        for servers in started:
            servers.close()
        for one in opened:
            one.close()


@pytest.mark.parametrize("kind", ["port", "unix", "https"])
@pytest.mark.parametrize("num_servers", [2, 4])
def test_acceptors_of_one_socket_spread_connections_evenly(make_servers, num_servers, kind):
    servers, _ = make_servers(range(num_servers), num_servers, kind)
    servers.connect(48)
    share = 48 // num_servers
    assert all(abs(count - share) <= 2 for count in servers.counts), servers.counts


def test_acceptor_that_is_closed_leaves_connections_to_the_others(make_servers):
    servers, _ = make_servers(range(2), 2)
    servers.connect(20)
    servers.acceptors[1].close()
    servers.acceptors[1].report()
    before = servers.counts
    servers.connect(12)
    assert servers.counts == [before[0] + 12, before[1]]


def test_acceptors_when_a_server_with_fewer_is_stuck_accept(make_servers):
    """The other server has published that it accepts, and does not."""
    servers, counts = make_servers([0], 2)
    counts[1].set(0)
    servers.connect(48)
    assert servers.counts == [48]


def test_acceptor_without_open_files_warns_and_continues(make_servers, monkeypatch, caplog):
    servers, _ = make_servers([0], 1)
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 2

    def fail(self):
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fail)
    servers.connect(1)
    assert not failures
    assert "nothing left for a further connection (Too many open files)" in caplog.text
    assert len(caplog.records) == 1
