"""The API keys that a request must have: any key of the server, or, for control routes, an admin key.

Pure; driven by the middleware for every request.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import Scope

from eagleray.config.sections import Config
from eagleray.server.error_responses import CONTROL_FORBIDDEN, WRONG_API_KEY, RefusedRequest

RELAYED = {"origin", "forwarded", "x-forwarded-for"}
"""Headers of requests that may come from elsewhere: from a page in a browser, or through a proxy."""


class KeyCheck:
    """`open_paths` need no key. `control_paths` need an admin key, or a key if there are no admin keys; without any key
    they serve programs of this host, and others with `--enable-rl` or an option that implies it."""

    def __init__(self, *, open_paths: Collection[str], control_paths: Collection[str], config: Config) -> None:
        options = config.serving
        self._open_paths = open_paths
        self._control_paths = control_paths
        admin_keys = _encoded(options.admin_api_key)
        self._keys = _encoded(options.api_key)
        self._all_keys = self._keys + admin_keys
        self.has_keys = bool(self._all_keys)
        """Whether there is any key; without one only control routes need a check."""
        self._control_keys = admin_keys or self._keys
        self._serves_remote_control = bool(
            options.enable_rl or options.enable_sleep_mode or config.execution.weight_transfer_config
        )

    def check(self, path: str, headers: Headers, *, is_local: bool) -> None:
        """Raise `RefusedRequest` if a request may not use the path. `is_local`: see `comes_from_this_host`."""
        if path in self._control_paths:
            if self._control_keys:
                _check_key(
                    headers, self._control_keys, "admin API key" if self._control_keys != self._keys else "API key"
                )
            elif not self._serves_remote_control and not (is_local and RELAYED.isdisjoint(headers.keys())):
                raise RefusedRequest(
                    f"{path} pauses the instance or changes its weights: without API keys it serves clients of this "
                    "host only. Start the server with `--admin-api-key`, or with `--enable-rl` to serve all clients",
                    CONTROL_FORBIDDEN,
                )
        elif self._keys and path not in self._open_paths:
            _check_key(headers, self._all_keys, "API key")


def _check_key(headers: Headers, keys: list[bytes], name: str) -> None:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    shown = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    # Every key is compared, in constant time, so that the time taken reveals nothing about any of them.
    matches = [hmac.compare_digest(key.encode("latin-1"), known) for key in shown for known in keys]
    if not any(matches):
        raise RefusedRequest(
            f"wrong or missing {name}; send it as `Authorization: Bearer KEY` or as `X-API-Key: KEY`",
            WRONG_API_KEY,
            {"www-authenticate": "Bearer"},
        )


def _encoded(keys: list[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def comes_from_this_host(scope: Scope) -> bool:
    """Whether the request's connection comes from this host."""
    server = scope.get("server")
    if server is not None and server[1] is None and server[0].startswith("/"):  # the path of a Unix socket
        return True
    try:
        address = ipaddress.ip_address((scope.get("client") or ("",))[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
