"""Rules for options of the HTTP server that depend on each other, checked when the configuration is built. Pure."""

from __future__ import annotations

import re

from eagleray.config.serving import ServingConfig
from eagleray.errors import ConfigError

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+/?|\*|null", re.IGNORECASE)
ROOT_PATH = re.compile(r"(/[^\s?#]*)?")


def check_http(options: ServingConfig) -> None:
    """Raise `ConfigError` for options of the HTTP server that contradict each other, or have no meaning."""
    _check_origins(options)
    if not ROOT_PATH.fullmatch(options.root_path):
        raise ConfigError(
            f"option `root_path`: a path such as /llm begins with a slash and has no query, but got "
            f"{options.root_path!r}"
        )


def _check_origins(options: ServingConfig) -> None:
    for origin in options.allowed_origins:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"option `allowed_origins`: an origin is a scheme and a host, such as https://example.org, or * for "
                f"all, but got {origin!r}"
            )
