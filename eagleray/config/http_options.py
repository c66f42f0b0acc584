"""Rules for options of the HTTP server that depend on each other, checked when the configuration is built. Pure."""

from __future__ import annotations

import re

from eagleray.config.serving import ServingConfig
from eagleray.errors import ConfigError

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+/?|\*|null", re.IGNORECASE)
ROOT_PATH = re.compile(r"(/[^\s?#]*)?")
MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path, a limit of Linux."""


def check_http(options: ServingConfig) -> None:
    """Raise `ConfigError` for options of the HTTP server that contradict each other, or have no meaning."""
    _check_tls(options)
    _check_origins(options)
    if not ROOT_PATH.fullmatch(options.root_path):
        raise ConfigError(
            f"option `root_path`: a path such as /llm begins with a slash and has no query, but got "
            f"{options.root_path!r}"
        )
    if options.uds_mode is not None and options.uds is None:
        raise ConfigError("option `uds_mode` is for a Unix socket: add `uds` with its path")
    if options.uds is not None and len(options.uds.encode()) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"option `uds`: the path of a Unix socket has at most {MAX_SOCKET_PATH} bytes, but this one has "
            f"{len(options.uds.encode())}: take a shorter one"
        )


def _check_tls(options: ServingConfig) -> None:
    if options.ssl_certfile is None:
        given = {
            "ssl_keyfile": options.ssl_keyfile is not None,
            "ssl_ca_certs": options.ssl_ca_certs is not None,
            "ssl_cert_reqs": options.ssl_cert_reqs > 0,
            "ssl_ciphers": options.ssl_ciphers is not None,
            "enable_ssl_refresh": options.enable_ssl_refresh,
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(f"option `{name}` is for HTTPS: add `ssl_certfile` with the server's certificate")
    elif options.ssl_cert_reqs > 0 and options.ssl_ca_certs is None:
        raise ConfigError(
            f"option `ssl_cert_reqs` {options.ssl_cert_reqs} checks the certificates of clients: add `ssl_ca_certs` "
            "with those of the authorities that certify clients"
        )


def _check_origins(options: ServingConfig) -> None:
    for origin in options.allowed_origins:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"option `allowed_origins`: an origin is a scheme and a host, such as https://example.org, or * for "
                f"all, but got {origin!r}"
            )
