"""The stream of states of a running server, for `eagleray top`, with HTTP of the standard library."""

from __future__ import annotations

import argparse
import http.client
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

from eagleray.cli.api_key import client_key
from eagleray.cli.remote import error_message
from eagleray.errors import Unavailable, UserError
from eagleray.server.dashboard.state import DashboardState

TIMEOUT_SECONDS = 10.0
"""Time without any news after which a connection is given up; a server sends its state every second."""

PREFIX = b"data: "
END = b"[DONE]"


class StateStream:
    """Reads the states of the server of `arguments`. Raises `UserError` for an invalid `--url`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._url = urlsplit(arguments.url)
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise UserError(f"--url {arguments.url}: expected http://HOST:PORT")
        self._path = self._url.path.rstrip("/").removesuffix("/v1")
        self.url = self._url._replace(path=self._path).geturl()
        key = client_key(arguments.api_key)
        self._headers = {"Accept": "text/event-stream"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def __iter__(self) -> Iterator[DashboardState]:
        """Yield the states until the stream ends, which happens from time to time, and when the server stops.

        Raises `UserError` if the server refuses or is another one, and `Unavailable` if it does not answer, cannot at
        present, or is lost.
        """
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("GET", f"{self._path}/dashboard/state", headers=self._headers)
            with connection.getresponse() as response:
                self._check(response)
                for line in response:
                    data = line.strip().removeprefix(PREFIX)
                    if data and data != END:
                        yield msgspec.json.decode(data, type=DashboardState)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"no server answers at {self.url}: {error or type(error).__name__}") from None
        except msgspec.MsgspecError:
            raise self._another_server() from None
        finally:
            connection.close()

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status == 401:
            raise UserError(f"the server at {self.url} needs an API key: give the right one by --api-key")
        if response.status == 503:
            raise Unavailable(error_message(response.read()))
        if response.status == 404:
            raise UserError(
                f"the server at {self.url} has no /dashboard/state: it is no eagleray server, or it was started with "
                "`--disable-dashboard`"
            )
        if response.status != 200:
            raise UserError(f"the server at {self.url} refused ({response.status}): {error_message(response.read())}")
        if not response.headers.get_content_type() == "text/event-stream":
            raise self._another_server()

    def _another_server(self) -> UserError:
        return UserError(f"what answers at {self.url} is no eagleray server, or one of another version")
