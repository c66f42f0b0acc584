"""HTTPS: certificates that fit or not, certificates that change, and connections with their limits of time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest
from certificates import install, make_expired_pair, make_pairs, openssl
from http_fakes import HttpServer
from socket_server import SECONDS, SocketServer, error_of, read_all

from eagleray.config.build import build_config
from eagleray.errors import ConfigError
from eagleray.server import tls
from eagleray.server.connections import RESERVED_CONNECTIONS, Handshake
from eagleray.server.tls import Certificates, load_tls

OPTIONS = {"header_timeout": 0.4, "body_timeout": 0.4, "keep_alive_timeout": 0.4, "send_timeout": 1.0}


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """A directory with the pairs a and b, an expired one, pair a in one file, an encrypted key of a, and broken
    files."""
    directory = tmp_path_factory.mktemp("certificates")
    make_pairs(directory, "ab")
    make_expired_pair(directory)
    (directory / "both.pem").write_text((directory / "a.key").read_text() + (directory / "a.pem").read_text())
    locked = ("-aes128", "-passout", "pass:secret", "-out", str(directory / "locked.key"))
    openssl("pkey", "-in", str(directory / "a.key"), *locked)
    (directory / "text.pem").write_text("nothing")
    (directory / "torn.pem").write_text((directory / "a.pem").read_text()[:300])
    return directory


def options_of(files, certificate, key, **more):
    return build_config(
        ssl_certfile=str(files / certificate), ssl_keyfile=None if key is None else str(files / key), **more
    ).serving


def test_load_tls_without_certificate_is_none():
    assert load_tls(build_config().serving) is None


@pytest.mark.parametrize(("certificate", "key"), [("a.pem", "a.key"), ("both.pem", None)])
def test_load_tls_of_a_pair_speaks_only_http_1_1_and_tls_1_2_or_later(files, certificate, key):
    context = load_tls(options_of(files, certificate, key))
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    ("certificate", "key", "more", "message"),
    [
        ("nowhere.pem", "a.key", {}, "`ssl_certfile`: cannot read .*nowhere.pem': No such file"),
        ("a.pem", "nowhere.key", {}, "`ssl_keyfile`: cannot read .*nowhere.key': No such file"),
        (".", "a.key", {}, "`ssl_certfile`: cannot read .*Is a directory"),
        ("a.pem", "b.key", {}, r"`ssl_keyfile`: the private key in .*b.key' does not belong to the certificate in .*a"),
        ("a.pem", "locked.key", {}, "`ssl_keyfile`: the private key in .*locked.key' is encrypted; decrypt it"),
        ("a.pem", None, {}, "`ssl_certfile`: .*a.pem' holds no private key .*; name the file .* `ssl_keyfile`"),
        ("text.pem", "a.key", {}, "`ssl_certfile`: .*text.pem' holds no certificate"),
        ("a.pem", "a.pem", {}, "`ssl_keyfile`: .*a.pem' holds no private key"),
        ("torn.pem", "a.key", {}, "`ssl_certfile`: OpenSSL cannot use .*torn.pem'"),
        ("a.pem", "a.key", {"ssl_ciphers": "NONE-SUCH"}, "`ssl_ciphers`: OpenSSL knows no cipher suite"),
        ("a.pem", "a.key", {"ssl_ca_certs": "nowhere"}, "`ssl_ca_certs`: cannot read"),
        ("a.pem", "a.key", {"ssl_ca_certs": "text.pem"}, "`ssl_ca_certs`: .* holds no certificate"),
        ("a.pem", "a.key", {"ssl_ca_certs": "torn.pem"}, "`ssl_ca_certs`: OpenSSL cannot read"),
    ],
)
def test_load_tls_of_files_that_do_not_fit_is_refused(files, certificate, key, more, message):
    more = {name: str(files / value) if name == "ssl_ca_certs" else value for name, value in more.items()}
    with pytest.raises(ConfigError, match=message):
        load_tls(options_of(files, certificate, key, **more))


@pytest.fixture
def used(files, tmp_path):
    """A copy of pair a, as options with refresh."""
    install(files, "a", tmp_path)
    return options_of(tmp_path, "used.pem", "used.key", enable_ssl_refresh=True)


def test_certificates_that_change_are_loaded(files, tmp_path, used, caplog):
    certificates = Certificates(used)
    first = certificates.context
    certificates.refresh()
    assert certificates.context is first
    install(files, "b", tmp_path)
    certificates.refresh()
    assert certificates.context is first, "the files may still be written"
    certificates.refresh()
    assert certificates.context is not first
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_certificates_that_have_expired_are_used_with_a_warning(files, tmp_path, used, caplog):
    assert load_tls(options_of(files, "expired.pem", "expired.key"), warns=True) is not None
    (warning,) = caplog.records
    assert "clients refuse" in warning.message and warning.message.endswith("expired.pem': certificate has expired")
    load_tls(used, warns=True)
    demanding = {"ssl_ca_certs": str(files / "b.pem"), "ssl_cert_reqs": 2}
    load_tls(options_of(files, "a.pem", "a.key", **demanding), warns=True)
    certificates = Certificates(used)
    assert len(caplog.records) == 1
    install(files, "expired", tmp_path)
    for _ in range(2):
        certificates.refresh()
    assert "certificate has expired" in caplog.records[1].message


def test_open_certificates_waits_for_files_that_fit(files, tmp_path, used, monkeypatch, caplog):
    monkeypatch.setattr(tls, "CERTIFICATE_POLL_SECONDS", 0.0)

    async def open_while_they_change() -> Certificates:
        (tmp_path / "used.pem").write_text("nothing")
        opening = asyncio.create_task(tls.open_certificates(used))
        for _ in range(5):
            await asyncio.sleep(0)
        install(files, "b", tmp_path)
        return await opening

    assert asyncio.run(open_while_they_change()).context is not None
    (warning,) = caplog.records
    assert "holds no certificate in PEM format; waiting up to 60 s" in warning.message
    monkeypatch.setattr(tls, "CERTIFICATE_SECONDS", 0.0)
    (tmp_path / "used.pem").write_text("nothing")
    with pytest.raises(ConfigError, match="holds no certificate"):
        asyncio.run(tls.open_certificates(used))


def test_certificates_that_are_broken_leave_the_old_until_they_are_mended(files, tmp_path, used, caplog):
    certificates = Certificates(used)
    first = certificates.context
    shutil.copy(files / "b.key", tmp_path / "used.key")
    for _ in range(5):
        certificates.refresh()
    assert certificates.context is first
    (warning,) = caplog.records
    assert "the changed files of the certificate are not used" in warning.message
    assert "does not belong to the certificate" in warning.message
    os.unlink(tmp_path / "used.pem")
    for _ in range(2):
        certificates.refresh()
    assert certificates.context is first
    install(files, "b", tmp_path)
    for _ in range(2):
        certificates.refresh()
    assert certificates.context is not first


def test_certificates_without_refresh_stay(files, tmp_path):
    install(files, "a", tmp_path)
    certificates = Certificates(options_of(tmp_path, "used.pem", "used.key"))
    first = certificates.context
    install(files, "b", tmp_path)
    for _ in range(3):
        certificates.refresh()
    assert certificates.context is first


def serve(files, directory, **more):
    listener = socket.create_server(("127.0.0.1", 0))
    options = {"ssl_certfile": str(files / "a.pem"), "ssl_keyfile": str(files / "a.key")}
    return SocketServer(listener, directory / "connections", **options | OPTIONS | more)


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    server = serve(files, tmp_path_factory.mktemp("server"))
    yield server
    server.close()


def client_context(files, name="a"):
    return ssl.create_default_context(cafile=files / f"{name}.pem")


def connect(server, context):
    return context.wrap_socket(server.connect(), server_hostname="localhost", suppress_ragged_eofs=True)


def get(path):
    return f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()


def read_answer(client):
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        more = client.recv(65536)
        assert more, "the connection was closed"
        data += more
    return data


def read_refusal(client):
    """Return an answer with a length, without waiting for the end of the connection."""
    data = b""
    while not (match := re.search(rb"content-length: (\d+)\r\n(?s:.*?)\r\n\r\n", data)) or len(data) < (
        match.end() + int(match[1])
    ):
        more = client.recv(65536)
        assert more, "the connection was closed"
        data += more
    return data


def test_https_requests_on_one_connection_are_answered(server, files):
    with connect(server, client_context(files)) as client:
        for _ in range(3):
            client.sendall(get("/scope"))
            answer = read_answer(client)
            scope = json.loads(answer.split(b"\r\n")[-4])
            assert (scope["scheme"], scope["client"][0]) == ("https", "127.0.0.1")


def test_https_handshake_that_never_ends_is_cut_in_time(server):
    with server.connect() as silent, server.connect() as slow:
        slow.sendall(b"\x16\x03\x01\x02\x00")
        assert read_all(silent) == b""
        assert read_all(slow) == b""


def test_https_garbage_or_http_is_no_handshake(server, files):
    for data in (get("/"), os.urandom(300), b"\x16\x03\x01\xff\xff" + b"\0" * 300):
        with server.connect() as client:
            client.sendall(data)
            try:
                answer = read_all(client)
            except ConnectionResetError:
                answer = b""
            assert b"HTTP/1.1" not in answer
    with connect(server, client_context(files)) as client:
        client.sendall(get("/"))
        assert b"ok" in read_answer(client)


def test_https_half_a_request_is_refused_in_time(server, files):
    with connect(server, client_context(files)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert error_of(read_refusal(client)) == "request_timeout"


def test_https_client_that_sends_without_reading_gets_its_refusal(server, files):
    with connect(server, client_context(files)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 800_000)
        assert error_of(read_refusal(client)) == "headers_too_large"


def test_https_connection_without_a_request_is_closed_in_time(server, files):
    with connect(server, client_context(files)) as client:
        assert read_all(client) == b""


def test_https_client_that_reads_nothing_is_disconnected(server, files):
    with connect(server, client_context(files)) as client:
        client.sendall(get("/endless"))
        assert server.has_ended.wait(SECONDS)


def wait_until(is_so):
    waiter = threading.Event()
    for _ in range(int(SECONDS * 100)):
        if is_so():
            return
        waiter.wait(0.01)
    raise AssertionError("it has not become so in time")


def test_https_handshakes_count_as_connections(files, tmp_path):
    server = serve(files, tmp_path, header_timeout=60.0)
    try:
        with server.connect(), server.connect() as second:
            wait_until(lambda: len(server.connections) == 2)
            second.close()
            wait_until(lambda: len(server.connections) == 1)
        wait_until(lambda: len(server.connections) == 0)
        assert not server.connections.waiting
    finally:
        server.close()


def test_https_new_connections_get_the_changed_certificate_and_open_ones_go_on(files, tmp_path):
    install(files, "a", tmp_path)
    options = {"ssl_certfile": str(tmp_path / "used.pem"), "ssl_keyfile": str(tmp_path / "used.key")}
    server = serve(files, tmp_path, enable_ssl_refresh=True, keep_alive_timeout=60.0, **options)
    try:
        with connect(server, client_context(files)) as old:
            install(files, "b", tmp_path)
            server.certificates.refresh()
            server.certificates.refresh()
            with connect(server, client_context(files, "b")) as new:
                for client in (new, old):
                    client.sendall(get("/"))
                    assert b"ok" in read_answer(client)
    finally:
        server.close()


def test_https_certificate_of_a_client_is_demanded(files, tmp_path):
    server = serve(files, tmp_path, ssl_cert_reqs=2, ssl_ca_certs=str(files / "b.pem"))
    try:
        context = client_context(files)
        data = b""
        with contextlib.suppress(OSError), connect(server, context) as client:
            client.sendall(get("/"))
            data = client.recv(65536)
        assert data == b""
        context.load_cert_chain(files / "b.pem", files / "b.key")
        with connect(server, context) as client:
            client.sendall(get("/"))
            assert b"ok" in read_answer(client)
    finally:
        server.close()


class Sockets:
    """Admitted connections in their handshakes, without a server."""

    def __init__(self, server: HttpServer) -> None:
        self.connections = server.connections
        self.clients: list[socket.socket] = []

    def begin(self) -> Handshake:
        ours, theirs = socket.socketpair()
        theirs.settimeout(SECONDS)
        self.clients.append(theirs)
        handshake = Handshake(ours, is_reserved=not self.connections.admit())
        self.connections.begin_handshake(handshake)
        return handshake

    def is_cut(self, handshake: Handshake) -> bool:
        try:
            handshake.connection.send(b"x")
        except OSError:
            return True
        return False

    def end(self, handshake: Handshake) -> None:
        handshake.connection.close()
        self.connections.arriving -= not handshake.is_reserved
        self.connections.end_handshake(handshake)

    def close(self) -> None:
        for client in self.clients:
            client.close()


@pytest.fixture
def sockets():
    with asyncio.Runner() as runner:
        sockets = Sockets(HttpServer(runner, max_connections=2))
        yield sockets
        sockets.close()


def test_handshakes_at_the_limit_give_way_after_a_moment(sockets):
    first, second = sockets.begin(), sockets.begin()
    third = sockets.begin()
    assert third.is_reserved, "their handshakes may be on the way"
    sockets.connections.tick(1.5)
    fourth = sockets.begin()
    assert (fourth.is_reserved, sockets.is_cut(first), sockets.is_cut(second)) == (False, True, False)
    for handshake in (first, second, third, fourth):
        sockets.end(handshake)
    assert (len(sockets.connections), sockets.connections.reserved, sockets.connections.waiting) == (0, {}, {})


def test_handshakes_of_the_reserve_are_bounded(sockets):
    started = [sockets.begin() for _ in range(2 + RESERVED_CONNECTIONS + 10)]
    assert len(sockets.connections.reserved) == RESERVED_CONNECTIONS
    assert sum(sockets.is_cut(one) for one in started) == 10
    for handshake in started:
        sockets.end(handshake)
    assert len(sockets.connections) == 0
