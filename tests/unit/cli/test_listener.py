"""The listening socket of a server: Unix sockets, what is in their way, and what is left of them."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from eagleray.cli.listener import api_url, open_listener
from eagleray.config.build import build_config
from eagleray.errors import ConfigError


@pytest.fixture
def path():
    """A path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="er-") as directory:
        yield Path(directory) / "s"


def options_of(path, **more):
    return build_config(uds=str(path), **more).serving


@pytest.mark.parametrize("mode", ["600", "660", "666"])
def test_open_listener_of_a_path_has_its_mode_and_is_removed(path, mode):
    umask = os.umask(0o022)
    try:
        with open_listener(options_of(path, uds_mode=mode)) as listener:
            assert stat.S_IMODE(path.stat().st_mode) == int(mode, 8)
            assert api_url(listener, options_of(path)) == f"unix:{path} (http://localhost/v1)"
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
    finally:
        assert os.umask(umask) == 0o022
    assert not path.exists()


def test_open_listener_without_mode_takes_that_of_the_umask(path):
    umask = os.umask(0o077)
    try:
        with open_listener(options_of(path)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
    finally:
        os.umask(umask)


def test_open_listener_replaces_a_socket_without_a_listener(path):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with open_listener(options_of(path)) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"x")
        listener.settimeout(10)
        with listener.accept()[0] as connection:
            assert connection.recv(1) == b"x"


@pytest.mark.parametrize("backlog", [0, 5])
def test_open_listener_refuses_a_path_where_others_listen(path, backlog):
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as first:
        other.bind(str(path))
        other.listen(backlog)
        first.connect(str(path))  # fills the backlog of 0
        with pytest.raises(ConfigError, match="another process listens at"), open_listener(options_of(path)):
            pass
        assert path.exists()


def test_open_listener_refuses_a_path_that_is_no_socket(path):
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is there already and is no socket"), open_listener(options_of(path)):
        pass
    assert path.read_text() == "precious"


def test_open_listener_refuses_a_directory_that_is_not_there(path):
    with (
        pytest.raises(ConfigError, match=r"`uds`: cannot listen at '.*/nowhere/s': No such file"),
        open_listener(options_of(path.parent / "nowhere" / "s")),
    ):
        pass


def test_open_listener_leaves_a_socket_of_others_at_the_end(path):
    with socket.socket(socket.AF_UNIX) as other:
        with open_listener(options_of(path)):
            path.unlink()
            other.bind(str(path))
        assert path.exists()


def test_api_url_names_scheme_port_and_root_path():
    options = build_config(port=0, root_path="/llm/", ssl_certfile="c").serving
    with open_listener(options) as listener:
        port = listener.getsockname()[1]
        assert api_url(listener, options) == f"https://127.0.0.1:{port}/llm/v1"


def test_open_listener_refuses_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"),
            open_listener(build_config(port=port).serving),
        ):
            pass
