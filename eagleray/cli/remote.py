"""A client of a running server for the commands `chat` and `complete`."""

from __future__ import annotations

import argparse
import http.client
import json
from collections.abc import Generator
from typing import Any

from eagleray.cli.api_key import ENVIRONMENT_HELP
from eagleray.cli.http_requests import error_message, key_header, parse_server_url, read_lines, send_request
from eagleray.errors import EagleRayError, UserError


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
        self._url = parse_server_url(arguments.url, example="http://HOST:PORT/v1")
        if self._url.path in ("", "/"):
            self._url = self._url._replace(path="/v1")
        self.url = self._url.geturl()
        self._headers: dict[str, str | bytes] = {
            "Content-Type": "application/json",
            **key_header(arguments.api_key),
        }
        self._fields = {
            name: value for name in ("max_tokens", "temperature") if (value := getattr(arguments, name)) is not None
        }
        self.model = self._fields["model"] = arguments.model_name or self._first_model()
        self.answer = ""
        """Text of the last streamed answer, so far."""
        self.num_tokens = 0
        """Number of its tokens, or of its parts until the server tells that."""

    def stream(self, route: str, fields: dict[str, Any]) -> Generator[str, None, None]:
        """Yield the parts of a streamed answer. The server stops when the generator is closed."""
        self.answer, self.num_tokens = "", 0
        fields = self._fields | fields | {"stream": True, "stream_options": {"include_usage": True}}
        with self._request("POST", route, fields) as response:
            for line in read_lines(response, self._url):
                data = line.strip().removeprefix(b"data:").strip()
                if data and data != b"[DONE]":
                    event = self._decode(data)
                    if "error" in event:
                        raise EagleRayError(event["error"]["message"])
                    for choice in event["choices"][:1]:
                        text = (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
                        self.answer += text
                        self.num_tokens += 1
                        yield text
                    if usage := event.get("usage"):
                        self.num_tokens = usage["completion_tokens"]

    def _decode(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise UserError(
                f"the server at {self.url} does not answer as OpenAI's API: name another by --url"
            ) from None

    def _first_model(self) -> str:
        with self._request("GET", "/models") as response:
            models = self._decode(b"".join(read_lines(response, self._url)))
        try:
            return str(models["data"][0]["id"])
        except (LookupError, TypeError):
            raise UserError(
                f"the server at {self.url} lists no model: name a server with OpenAI's API by --url"
            ) from None

    def _request(self, method: str, route: str, body: Any = None) -> http.client.HTTPResponse:
        response = send_request(self._url, method, route, json.dumps(body) if body else None, headers=self._headers)
        if response.status != 200:
            raise UserError(f"the server refused ({response.status}): {error_message(response)}")
        return response
