"""The limits of an API server's connections: their number, and the size and time of their requests.

Pure; made once at the start from the options.
"""

from __future__ import annotations

from typing import NamedTuple

from eagleray.config.sections import Config
from eagleray.errors import ConfigError

DEFAULT_CONNECTIONS = 8192

SPARE_FILES = 512
"""Number of open files kept for other uses than connections: sockets to engines, the reserve, files of `/metrics`."""

BODIES_IN_MEMORY = 4
"""Number of largest bodies (`max_request_bytes`) that all unfinished requests may hold together."""


class HttpLimits(NamedTuple):
    """Limits of size and time; times in seconds."""

    max_connections: int
    max_header_bytes: int
    max_header_count: int
    max_unfinished_bytes: int
    """Limit of the bytes of requests that have not arrived completely, over all connections."""
    header_timeout: float
    body_timeout: float
    keep_alive_timeout: float
    send_timeout: float

    @classmethod
    def of(cls, config: Config, *, open_files: int) -> HttpLimits:
        """Return the limits of these options, in a process that may have `open_files`. Raises `ConfigError`."""
        serving = config.serving
        return cls(
            max_connections=connection_limit(serving.max_connections, open_files=open_files),
            max_header_bytes=serving.max_header_bytes,
            max_header_count=serving.max_header_count,
            max_unfinished_bytes=BODIES_IN_MEMORY * serving.max_request_bytes,
            header_timeout=serving.header_timeout,
            body_timeout=serving.body_timeout,
            keep_alive_timeout=serving.keep_alive_timeout,
            send_timeout=serving.send_timeout,
        )


def connection_limit(wanted: int | None, *, open_files: int) -> int:
    """Return the most connections of a process that may have `open_files`. `wanted`: option `max_connections`.

    Raises `ConfigError` if `wanted` does not fit.
    """
    most = max(1, open_files - min(SPARE_FILES, open_files // 2))
    if wanted is None:
        return min(DEFAULT_CONNECTIONS, most)
    if wanted > most:
        raise ConfigError(
            f"option `max_connections`: {wanted} were asked for, but with {open_files} open files, the most that this "
            f"system lets a process have, an API server can keep {most}: lower it, or raise the hard limit "
            "(`ulimit -Hn`, LimitNOFILE of systemd)"
        )
    return wanted
