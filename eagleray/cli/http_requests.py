"""Requests of the commands to a running server, with HTTP of the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from urllib.parse import SplitResult, urlsplit

from eagleray.cli.api_key import client_key
from eagleray.errors import Unavailable, UserError

CONNECT_SECONDS = 10.0
"""Time in which a server must accept a connection."""


def parse_server_url(text: str, *, example: str) -> SplitResult:
    """Return the parts of the option `--url`. Raises `UserError` if it is no URL of a server, such as the example."""
    with contextlib.suppress(ValueError):  # of an impossible port, address or name of a host
        url = urlsplit(text)
        has_host = url.port != 0 and bool((url.hostname or "").encode("idna"))
        if has_host and url.scheme in ("http", "https") and url.path.isascii() and not re.search(r"\s", text):
            return url
    raise UserError(f"--url {text}: expected {example}")


def key_header(given: str | None) -> dict[str, bytes]:
    """Return the header with the key of the option `--api-key` or of the environment; none without a key.

    Raises `UserError` for a key that no header can contain.
    """
    key = client_key(given)
    if not key:
        return {}
    if not key.isprintable():
        raise UserError("the API key has a line break or a control character: give one without")
    return {"Authorization": f"Bearer {key}".encode()}


def send_request(
    url: SplitResult,
    method: str,
    route: str,
    body: str | None = None,
    *,
    headers: Mapping[str, str | bytes],
    timeout: float | None = None,
) -> http.client.HTTPResponse:
    """Send a request to a route below `url`, and return the response. Its connection is closed with it.

    `timeout`: longest wait for each part of the response in seconds; None: without limit, as for a long answer. Raises
    `Unavailable` if no server answers.
    """
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
        connection.sock.settimeout(timeout)
        path = url.path.rstrip("/") + route
        connection.request(method, path, body, {"Connection": "close", **headers})
        response = connection.getresponse()
        if connection.sock is not None:  # the server keeps the connection: the response has a reference of its own
            connection.sock.close()
        return response
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise Unavailable(
            f"no server answers at {url.geturl()} ({_reason(error)}): start one with `eagleray serve`, or name another "
            "by --url"
        ) from None


def read_lines(response: http.client.HTTPResponse, url: SplitResult) -> Iterator[bytes]:
    """Yield the lines of a response of `url`. Raises `Unavailable` if it breaks off."""
    try:
        yield from response
    except (OSError, http.client.HTTPException) as error:
        cause = "its connection was closed" if isinstance(error, http.client.IncompleteRead) else _reason(error)
        raise Unavailable(f"the answer of {url.geturl()} broke off: {cause}") from None


def error_message(response: http.client.HTTPResponse) -> str:
    """Return the message of a response with an error, or the beginning of a body that is in another form."""
    body = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = response.read()
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
