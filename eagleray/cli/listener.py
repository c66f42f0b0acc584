"""The listening socket of `eagleray serve`: a port, or a Unix socket, which is removed at the end.

Held by the supervisor for as long as the instance runs; its API servers inherit it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from eagleray.config.serving import ServingConfig
from eagleray.errors import ConfigError
from eagleray.transport.runtime_dir import is_listening

BACKLOG = 2048


@contextlib.contextmanager
def open_listener(options: ServingConfig) -> Iterator[socket.socket]:
    """Listen as the options say. Raises `ConfigError` if the address is not available."""
    if options.uds is not None:
        mode = None if options.uds_mode is None else int(options.uds_mode, 8)
        with _listen_at_path(Path(options.uds).expanduser().absolute(), mode) as listener:
            yield listener
    else:
        with _listen_at_port(options.host, options.port) as listener:
            yield listener


def api_url(listener: socket.socket, options: ServingConfig) -> str:
    """Return the URL of the API, or for a Unix socket its path after `unix:`."""
    scheme = "http" if options.ssl_certfile is None else "https"
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()} ({scheme}://localhost{options.url_prefix}/v1)"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}{options.url_prefix}/v1"


def _listen_at_port(host: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot listen on {host}:{port}: {reason}; choose another with `--host` and `--port`, "
                "or `--port 0` for a free one"
            ) from None
        stack.pop_all()
        return listener


@contextlib.contextmanager
def _listen_at_path(path: Path, mode: int | None) -> Iterator[socket.socket]:
    """Listen at a Unix socket with these permissions, or with those of the umask."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            _remove_stale(path)
            _bind(listener, path, mode)
            listener.listen(BACKLOG)
            made = path.lstat()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"option `uds`: cannot listen at {str(path)!r}: {reason}; choose another path") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):  # removed by others
                if os.path.samestat(path.lstat(), made):
                    path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove a socket at the path that a server has left which was killed. Raises `ConfigError` for anything else."""
    try:
        state = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(state.st_mode):
        raise ConfigError(f"option `uds`: {str(path)!r} is there already and is no socket; choose another path")
    if is_listening(path):
        raise ConfigError(f"option `uds`: another process listens at {str(path)!r}; stop it, or choose another path")
    path.unlink()


def _bind(listener: socket.socket, path: Path, mode: int | None) -> None:
    if mode is None:
        listener.bind(str(path))
        return
    # The umask sets the mode: others could connect between `bind` and a `chmod`.
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
