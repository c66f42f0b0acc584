"""Connections over real sockets, in the event loop of API servers: the limits of time that the kernel enforces."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from socket_server import SECONDS, SocketServer, error_of, read_all

from eagleray.cli.listener import open_listener
from eagleray.config.build import build_config
from eagleray.server.key_check import comes_from_this_host

OPTIONS = {"header_timeout": 0.4, "body_timeout": 0.4, "keep_alive_timeout": 0.4, "send_timeout": 1.0}


@pytest.fixture(scope="module", params=["port", "unix"])
def server(request, tmp_path_factory) -> Iterator[SocketServer]:
    directory = tmp_path_factory.mktemp("server")
    if request.param == "port":
        listener = socket.create_server(("127.0.0.1", 0))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / "s"))
        listener.listen()
    server = SocketServer(listener, directory / "connections", **OPTIONS)
    yield server
    server.close()


def test_client_that_sends_without_reading_gets_its_refusal(server):
    with server.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 800_000)
        assert error_of(read_all(client)) == "headers_too_large"


def test_client_that_sends_a_body_without_reading_gets_the_last_answer(server):
    body = b"x" * 8_000_000
    with server.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 8000000\r\n\r\n" + body)
        assert read_all(client).startswith(b"HTTP/1.1 200 OK\r\n")


def test_half_a_request_is_refused_in_time(server):
    with server.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert error_of(read_all(client)) == "request_timeout"


def test_connection_without_a_request_is_closed_in_time(server):
    with server.connect() as client:
        began = time.monotonic()
        assert read_all(client) == b""
        assert 0.3 < time.monotonic() - began < 5.0


def test_connection_between_requests_stays_open(server):
    with server.connect() as client:
        for _ in range(3):
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                more = client.recv(65536)
                assert more, "the connection was closed"
                answer += more
            assert re.match(rb"HTTP/1.1 200 .*ok", answer, re.DOTALL)


def test_client_that_reads_nothing_is_disconnected(server):
    with server.connect() as client:
        client.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        assert server.has_ended.wait(SECONDS)


def test_openai_client_reaches_a_unix_socket(tmp_path):
    with open_listener(build_config(uds=str(tmp_path / "s")).serving) as listener:
        server = SocketServer(listener.dup(), tmp_path / "connections")
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "s")), timeout=SECONDS) as http:
                client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)
                assert [model.id for model in client.models.list()] == ["tiny"]
                scope = http.get("http://localhost/scope").json()
            assert (scope["client"], scope["server"]) == (None, [str(tmp_path / "s"), None])
            assert comes_from_this_host(scope)
        finally:
            server.close()
