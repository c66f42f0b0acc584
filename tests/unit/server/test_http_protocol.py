"""HTTP on one connection: requests that are understood, requests that are refused, and their time limits."""

from __future__ import annotations

import asyncio

import pytest
from http_fakes import HttpServer, request

from eagleray.server.timeouts import LINGER_SECONDS

CHUNKED = request("/echo", "Transfer-Encoding: chunked", method="POST")


@pytest.fixture
def make_server():
    with asyncio.Runner() as runner:
        yield lambda **options: HttpServer(runner, **options)


@pytest.fixture
def server(make_server):
    return make_server()


@pytest.fixture
def connection(server):
    return server.connect()


def test_protocol_consecutive_requests_are_answered(connection):
    connection.send(request("/a", body=b"one", method="POST"))
    assert connection.answer().body == b"POST /a one"
    connection.send(request("/b?x=1"))
    assert connection.answer().body == b"GET /b "
    assert connection.is_open


def test_protocol_request_byte_by_byte_is_answered(connection):
    connection.send(*(bytes([byte]) for byte in request("/a", body=b"body", method="POST")))
    assert connection.answer().body == b"POST /a body"


def test_protocol_chunked_body_is_joined(connection):
    connection.send(CHUNKED, b"3\r\nabc\r\n", b"2;ext=1\r\nde\r\n0\r\n\r\n")
    assert connection.answer().body == b"POST /echo abcde"
    assert connection.is_open


def test_protocol_pipelined_requests_are_answered_in_order(connection):
    connection.send(request("/a") + request("/b", body=b"x", method="POST") + request("/c"))
    assert [answer.body for answer in connection.answers()] == [b"GET /a ", b"POST /b x", b"GET /c "]


def test_protocol_too_many_pipelined_requests_get_429_after_the_others(connection):
    connection.send(request("/a") * 100)
    *answers, last = connection.answers()
    assert {answer.status for answer in answers} == {200}
    assert last.status == 429
    assert not connection.is_open


def test_protocol_expect_is_answered_when_the_body_is_read(connection):
    head, body = request("/a", "Expect: 100-continue", body=b"body", method="POST").split(b"\r\n\r\n")
    connection.send(head + b"\r\n\r\n")
    assert connection.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.transport.written = b""
    connection.send(body)
    assert connection.answer().body == b"POST /a body"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("is_split", [False, True])
def test_protocol_upgrade_is_ignored_and_body_and_next_request_are_read(connection, method, is_split):
    headers = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ"]
    body = request("/smuggled") if method == "POST" else None
    data = request("/a", *headers, method=method, body=body) + request("/b")
    connection.send(*(bytes([byte]) for byte in data) if is_split else [data])
    expected = f"{method} /a ".encode() + (body or b"")
    assert [answer.body for answer in connection.answers()] == [expected, b"GET /b "]


def test_protocol_websocket_handshake_is_answered_as_a_request(connection):
    connection.send(request("/a", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"))
    assert connection.answer().body == b"GET /a "


def test_protocol_trailers_do_not_become_headers(server, connection):
    connection.send(CHUNKED + b"1\r\nx\r\n0\r\nAuthorization: Bearer stolen\r\nX-Request-Id: other\r\n\r\n")
    assert connection.answer().status == 200
    assert dict(server.app.scopes[0]["headers"]).keys() == {b"host", b"transfer-encoding"}


def test_protocol_endless_trailers_are_refused(connection):
    connection.send(CHUNKED + b"1\r\nx\r\n0\r\n", *[b"X-Trailer: " + b"y" * 1000 + b"\r\n"] * 100)
    assert connection.answer().status == 431
    assert not connection.is_open


def test_protocol_endless_chunk_extensions_are_refused(connection):
    connection.send(CHUNKED + b"1\r\nx\r\n1;", *[b"e" * 10_000] * 10)
    assert connection.answer().status == 431


def test_protocol_many_small_chunks_are_accepted(connection):
    connection.send(*[CHUNKED, *[b"1\r\nx\r\n" * 2000] * 10, b"0\r\n\r\n"])
    assert len(connection.answer().body) == len("POST /echo ") + 20_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "needs one header `Host`, but none came"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", "needs one header `Host`, but 2 came"),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", "needs one header `Host`, but 2 came"),
        (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", "not the name of a host"),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", "not HTTP/2.0"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "not a request of HTTP/1.1"),
        (b"GET /\r\n\r\n", "not HTTP/0.9"),
        (b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", "Invalid HTTP version"),
        (b"\x16\x03\x01\x02\x00\x01", "Invalid method"),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", "not a path"),
        (b"GET http://a HTTP/1.1\r\nHost: a\r\n\r\n", "not a path"),
        (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", "not a"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX : b\r\n\r\n", "Invalid header token"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n", "whitespace"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n", "Invalid header value"),
        (b"GET / HTTP/1.1\nHost: a\n\n", "Expected CRLF"),
        (request(method="POST", body=b"x").replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"), "can't be"),
        (request("/", "Transfer-Encoding: chunked", "Content-Length: 1", method="POST"), "can't be"),
        (request("/", "Content-Length: 1", "Content-Length: 2", method="POST"), "Duplicate"),
        (request("/", "Content-Length: 1", "Content-Length: 1", method="POST"), "Duplicate"),
        (request("/", "Content-Length: -1", method="POST"), "Content-Length"),
        (request("/", "Content-Length: " + "9" * 30, method="POST"), "Content-Length"),
        (request("/", "Transfer-Encoding: chunked, gzip", method="POST"), "Transfer-Encoding"),
        (request("/", "Transfer-Encoding: gzip", method="POST"), "Transfer-Encoding"),
        (CHUNKED + b"1\nx\r\n", "chunk size"),
        (CHUNKED + b"0x1\r\nx\r\n", "chunk size"),
        (CHUNKED + b"-1\r\n", "chunk size"),
    ],
)
def test_protocol_malformed_request_gets_400_and_is_closed(connection, text, message):
    connection.send(text)
    answer = connection.answer()
    assert answer.status == 400
    assert answer.error.keys() == {"message", "type", "param", "code"}
    assert message in answer.error["message"]
    assert answer.error["code"] == "malformed_request"
    assert answer.headers["connection"] == "close"
    assert not connection.is_open
    connection.send(request())
    assert connection.answers() == []


def test_protocol_http_1_0_needs_no_host(connection):
    connection.send(b"GET /a HTTP/1.0\r\n\r\n")
    assert connection.answer().body == b"GET /a "
    assert not connection.is_open


def test_protocol_refusal_follows_the_stream_before_it(server, connection):
    connection.send(request("/stream") + b"GET / HTTP/1.1\r\n\r\n")
    assert b"first" in connection.transport.written
    assert b"Host" not in connection.transport.written
    server.app.go_on.set()
    server.settle()
    stream, refusal = connection.answers()
    assert stream.body == b"first last"
    assert refusal.status == 400
    assert not connection.is_open


@pytest.mark.parametrize("pieces", [1, 10, 1000])
def test_protocol_large_headers_get_431(server, connection, pieces):
    line = b"X: " + b"y" * 70_000
    head = b"GET / HTTP/1.1\r\nHost: a\r\n" + line
    size = len(head) // pieces + 1
    connection.send(*(head[start : start + size] for start in range(0, len(head), size)))
    answer = connection.answer()
    assert answer.status == 431
    assert "65536 bytes" in answer.error["message"]
    assert "`max_header_bytes`" in answer.error["message"]
    assert server.refusals == [431]


def test_protocol_headers_at_the_limit_pass_and_one_byte_more_is_refused(make_server):
    server = make_server(max_header_bytes=2000)
    most = 2000 - len(request("/", "X: "))
    for size, status in ((most, 200), (most + 1, 431)):
        connection = server.connect()
        connection.send(request("/", "X: " + "y" * size))
        assert connection.answer().status == status


def test_protocol_long_target_gets_431(connection):
    connection.send(b"GET /", *[b"a" * 10_000] * 10)
    assert connection.answer().status == 431


def test_protocol_many_headers_get_431(connection):
    connection.send(request("/", *[f"X-{i}: 1" for i in range(300)]))
    answer = connection.answer()
    assert answer.status == 431
    assert "`max_header_count`" in answer.error["message"]


def test_protocol_large_pipelined_headers_are_refused_after_the_answer(connection):
    connection.send(request("/a", body=b"x" * 100_000, method="POST") + b"GET / HTTP/1.1\r\nX: ", *[b"y" * 9000] * 9)
    first, refusal = connection.answers()
    assert first.status == 200
    assert refusal.status == 431


def test_protocol_refused_client_can_read_the_answer_before_the_close(server, connection):
    connection.send(b"nonsense\r\n")
    assert connection.transport.has_sent_eof
    server.pass_time(1.0)
    assert not connection.transport.is_closed
    connection.send(*[b"x" * 2**20] * 2)
    assert connection.transport.is_paused
    server.pass_time(1.5)
    assert connection.transport.is_closed


def test_protocol_late_headers_get_408(server, connection):
    server.pass_time(50.0)
    connection.send(b"GET / HTTP/1.1\r\n")
    for _ in range(28):
        connection.send(b"X: 1\r\n")
        server.pass_time(1.0)
    assert connection.is_open
    server.pass_time(3.0)
    answer = connection.answer()
    assert answer.status == 408
    assert "30 s" in answer.error["message"]
    assert not connection.is_open


@pytest.mark.parametrize("data", [b"", b"\r\n\r\n", request()])
def test_protocol_idle_connection_is_closed_without_an_answer(server, connection, data):
    connection.send(data)
    connection.transport.written = b""
    server.pass_time(59.0)
    assert connection.is_open
    server.pass_time(2.0)
    assert connection.transport.is_closed
    assert connection.transport.written == b""


def test_protocol_slow_body_is_read(server, connection):
    connection.send(request("/a", "Content-Length: 10", method="POST"))
    for _ in range(10):
        server.pass_time(29.0)
        connection.send(b"x")
    assert connection.answer().body == b"POST /a xxxxxxxxxx"


def test_protocol_body_that_stops_gets_408(server, connection):
    connection.send(request("/a", "Content-Length: 10", method="POST"), b"x")
    server.pass_time(31.0)
    answer = connection.answer()
    assert answer.status == 408
    assert answer.error["code"] == "request_timeout"
    assert "`body_timeout`" in answer.error["message"]
    assert server.app.errors == ["request_timeout"]
    assert not connection.is_open


def test_protocol_stream_without_events_is_not_idle(server, connection):
    connection.send(request("/stream"))
    server.pass_time(10_000.0)
    assert connection.is_open
    server.app.go_on.set()
    server.settle()
    assert connection.answer().body == b"first last"


def test_protocol_rest_of_an_answered_body_is_skipped(server, connection):
    connection.send(request("/ignore", "Content-Length: 10", method="POST") + b"12345")
    assert connection.answer().body == b'"ignored"'
    connection.send(b"67890" + request("/b"))
    assert connection.answer().body == b"GET /b "


def test_protocol_missing_rest_of_an_answered_body_closes_the_connection(server, connection):
    connection.send(request("/ignore", "Content-Length: 1000", method="POST"))
    assert connection.answer().status == 200
    for _ in range(4):
        server.pass_time(10.0)
        connection.send(b"x")
    assert connection.transport.is_closed


def test_protocol_endless_rest_of_an_answered_body_closes_the_connection(make_server):
    server = make_server(max_request_bytes=1000)
    connection = server.connect()
    connection.send(request("/ignore", "Content-Length: 1000000", method="POST"), *[b"x" * 1000] * 5)
    assert connection.transport.is_closed


def test_protocol_last_answer_before_the_body_has_come_closes_after_the_body(connection):
    connection.send(request("/ignore", "Content-Length: 10", "Connection: close", method="POST") + b"12345")
    assert connection.answer().headers["connection"] == "close"
    assert connection.transport.has_sent_eof and not connection.transport.is_closed
    connection.send(b"67890")
    assert connection.transport.is_closed


def test_protocol_last_answer_before_the_body_has_come_waits_for_a_bounded_time(server, connection):
    connection.send(request("/ignore", "Content-Length: 10", "Connection: close", method="POST"))
    server.pass_time(29.0)
    assert not connection.transport.is_closed
    server.pass_time(2.0)
    assert connection.transport.is_closed


def test_protocol_broken_body_is_answered_before_the_connection_is_closed(server, connection):
    connection.send(request("/echo", "Transfer-Encoding: chunked", method="POST") + b"no size\r\n")
    assert connection.answer().status == 400
    connection.send(b"x" * 1000)
    assert connection.transport.has_sent_eof and not connection.transport.is_closed
    server.pass_time(LINGER_SECONDS + 1)
    assert connection.transport.is_aborted


def test_protocol_concurrent_large_bodies_are_limited_and_small_ones_pass(make_server):
    server = make_server(max_request_bytes=100_000)
    first, second, small = (server.connect() for _ in range(3))
    first.send(request("/a", "Content-Length: 500000", method="POST"), b"x" * 390_000)
    second.send(request("/a", "Content-Length: 300000", method="POST"), b"x" * 20_000)
    answer = second.answer()
    assert answer.status == 503
    assert answer.headers["retry-after"] == "5"
    assert "400000 bytes" in answer.error["message"]
    small.send(request("/a", body=b"x" * 5000, method="POST"))
    assert small.answer().status == 200
    second.send(b"x" * 280_000 + request("/b"))
    assert second.answer().body == b"GET /b ", "the rest was not skipped"
    first.send(b"x" * 110_000)
    assert first.answer().status == 503
    first.lose()
    assert server.connections.unfinished_bytes == 0


def test_protocol_concurrent_large_headers_are_limited(make_server):
    server = make_server(max_request_bytes=10_000)
    first, second = server.connect(), server.connect()
    first.send(b"GET / HTTP/1.1\r\nX: " + b"y" * 30_000)
    second.send(b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000)
    assert second.answer().status == 503
    assert first.is_open
    first.lose()
    assert server.connections.unfinished_bytes == 0


def test_connections_after_large_requests_return_memory(make_server, monkeypatch):
    calls = []
    monkeypatch.setattr("eagleray.server.connections.malloc_trim", lambda: calls.append(None))
    server = make_server()
    connection = server.connect()
    connection.send(request("/a", f"Content-Length: {2**26}", method="POST"), b"x" * (2**24 + 1))
    server.pass_time(1.0)
    assert not calls
    connection.lose()
    server.pass_time(1.0)
    server.pass_time(1.0)
    assert len(calls) == 1
