"""A client of a running server for the commands `chat` and `complete`, with HTTP of the standard library."""

from __future__ import annotations

import argparse
import http.client
import json
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

from eagleray.cli.api_key import ENVIRONMENT_HELP, client_key
from eagleray.errors import EagleRayError, Unavailable, UserError


def add_remote_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://localhost:8000/v1", help="the server's API (default: %(default)s)")
    parser.add_argument("--model-name", help="name of the model (default: the first one that the server has)")
    parser.add_argument("--api-key", help=ENVIRONMENT_HELP)
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, help="0 for the likeliest tokens (default: the model's)")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this, print the answer and end")


class Remote:
    """Sends requests. Raises `UserError` for a refused request, and `Unavailable` if no server can be reached."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._url = urlsplit(arguments.url)
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise UserError(f"--url {arguments.url}: expected http://HOST:PORT/v1")
        if self._url.path in ("", "/"):
            self._url = self._url._replace(path="/v1")
        self.url = self._url.geturl()
        key = client_key(arguments.api_key)
        # Each request has a connection, which is closed with its response.
        self._headers = {"Content-Type": "application/json", "Connection": "close"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self._fields = {
            name: value for name in ("max_tokens", "temperature") if (value := getattr(arguments, name)) is not None
        }
        self.model = self._fields["model"] = arguments.model_name or self._first_model()
        self.num_tokens = 0
        """Number of tokens of the last streamed answer; 0 if the server did not tell it."""

    def stream(self, route: str, fields: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the first choice of every event of a streamed answer. The server stops when the generator is closed."""
        self.num_tokens = 0
        with self._request("POST", route, self._fields | fields | {"stream": True}) as response:
            for line in self._lines(response):
                data = line.decode().strip().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise EagleRayError(event["error"]["message"])
                    self.num_tokens = (event.get("usage") or {}).get("completion_tokens", 0)
                    yield from event["choices"][:1]

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            yield from response
        except (OSError, http.client.HTTPException) as error:
            cause = "its connection was closed" if isinstance(error, http.client.IncompleteRead) else _reason(error)
            raise Unavailable(f"the answer of {self.url} broke off: {cause}") from None

    def _first_model(self) -> str:
        with self._request("GET", "/models") as response:
            return str(json.load(response)["data"][0]["id"])

    def _request(self, method: str, route: str, body: Any = None) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port)
        try:
            connection.request(
                method, self._url.path.rstrip("/") + route, json.dumps(body) if body else None, self._headers
            )
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unavailable(
                f"no server answers at {self.url} ({_reason(error)}): start one with `eagleray serve`, or name "
                "another by --url"
            ) from None
        if response.status != 200:
            raise UserError(f"the server refused ({response.status}): {error_message(response.read())}")
        return response


def _reason(error: OSError | http.client.HTTPException) -> str:
    return getattr(error, "strerror", None) or str(error)


def error_message(body: bytes) -> str:
    """Return the message of an error's body, or the beginning of a body that is in another form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
