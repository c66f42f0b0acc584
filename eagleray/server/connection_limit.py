"""The limit of an API server's connections, which its open files bound. Pure."""

from __future__ import annotations

from eagleray.errors import ConfigError

DEFAULT_CONNECTIONS = 8192

SPARE_FILES = 512
"""Number of open files kept for other uses than connections: sockets to engines, the reserve, files of `/metrics`."""


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
