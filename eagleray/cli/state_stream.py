"""The stream of states of a running server, for `eagleray top`."""

from __future__ import annotations

import argparse
import http.client
from collections.abc import Iterator

import msgspec

from eagleray.cli.http_requests import error_message, key_header, parse_server_url, read_lines, send_request
from eagleray.errors import Unavailable, UserError
from eagleray.server.dashboard.state import DashboardState

TIMEOUT_SECONDS = 10.0
"""Time without a state after which a connection is given up; a server sends one every second."""

PREFIX = b"data: "
END = b"[DONE]"


class StateStream:
    """Reads the states of the server of `arguments`. Raises `UserError` for an invalid `--url` or key."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        url = parse_server_url(arguments.url, example="http://HOST:PORT")
        self._url = url._replace(path=url.path.rstrip("/").removesuffix("/v1"))
        self.url = self._url.geturl()
        self._headers: dict[str, str | bytes] = {"Accept": "text/event-stream", **key_header(arguments.api_key)}

    def __iter__(self) -> Iterator[DashboardState]:
        """Yield the states until the stream ends, which happens from time to time, and when the server stops.

        Raises `UserError` if the server refuses or is another one, and `Unavailable` if it does not answer, cannot at
        present, or is lost.
        """
        route = "/dashboard/state"
        with send_request(self._url, "GET", route, headers=self._headers, timeout=TIMEOUT_SECONDS) as response:
            self._check(response)
            for line in read_lines(response, self._url):
                data = line.strip().removeprefix(PREFIX)
                if data and data != END:
                    yield self._decode(data)

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status == 401:
            raise UserError(f"the server at {self.url} needs an API key: give the right one by --api-key")
        if response.status == 503:
            raise Unavailable(error_message(response))
        if response.status == 404:
            raise UserError(
                f"the server at {self.url} has no /dashboard/state: it is no eagleray server, or it was started with "
                "`--disable-dashboard`"
            )
        if response.status != 200:
            raise UserError(f"the server at {self.url} refused ({response.status}): {error_message(response)}")
        if response.headers.get_content_type() != "text/event-stream":
            raise self._another_server()

    def _decode(self, data: bytes) -> DashboardState:
        try:
            return msgspec.json.decode(data, type=DashboardState)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise self._another_server() from None

    def _another_server(self) -> UserError:
        return UserError(f"the server at {self.url} is no eagleray server, or is one of another version")
