"""A client of the scaling routes of a running server, for the commands `scale` and `restart`."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from eagleray.cli.api_key import client_key
from eagleray.cli.http_requests import error_message, key_header, parse_server_url, read_lines, send_request
from eagleray.config.api_keys import divided_keys
from eagleray.config.environment import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE
from eagleray.errors import EagleRayError, Unavailable, UserError

TIMEOUT_SECONDS = 30.0
POLL_SECONDS = (0.1, 1.0)
"""First and longest interval at which the status of an operation is asked for."""

LOST_SECONDS = 30.0
"""Time for which a server that does not answer is asked again while an operation runs."""

STATUS_FIELDS = (
    *("operation_id", "phase", "participating_ranks", "active_api_server_count"),
    *("waiting_for", "last_error", "seconds"),
)
ENDED = ("idle", "completed", "failed")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://localhost:8000", help="the server (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        help=f"admin API key to send (default: the variable {ADMIN_API_KEY_VARIABLE}, or {API_KEY_VARIABLE}, or else "
        "OPENAI_API_KEY)",
    )


def add_operation_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="time for engines that go to finish their requests, which then move to others (default: %(default)s)",
    )
    parser.add_argument(
        "--operation-id", metavar="ID", help="the same id with the same options is the same operation (default: random)"
    )
    parser.add_argument("--no-wait", action="store_true", help="end when the operation has begun")


def ranks(text: str) -> list[int]:
    """Return ranks that are divided by commas, as the type of an option."""
    return [int(part) for part in text.split(",")]


class FleetOperation:
    """The operation that the arguments name, at their server. Raises `UserError` for an invalid `--url` or key."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        url = parse_server_url(arguments.url, example="http://HOST:PORT")
        self._url = url._replace(path=url.path.rstrip("/").removesuffix("/v1"))
        key = arguments.api_key or _first_admin_key() or client_key(None)
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json", **key_header(key)}
        self._operation_id: str | None = arguments.operation_id

    def begin(self, route: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Begin the operation, or join the one with its id, and return its status."""
        self._operation_id = self._operation_id or secrets.token_hex(8)
        body = {**fields, "operation_id": self._operation_id, "wait": False}
        return self._request("POST", route, json.dumps(body))

    def status(self) -> dict[str, Any]:
        """Return the status of the operation with the id that was given, or of the one that runs, or the last."""
        query = "" if self._operation_id is None else f"?operation_id={quote(self._operation_id, safe='')}"
        return self._request("GET", f"/scale{query}")

    def follow(self, status: dict[str, Any]) -> dict[str, Any]:
        """Print the progress of the operation until it ends, and return its last status.

        Raises `Unavailable` if no server answers for `LOST_SECONDS`.
        """
        shown, answered = "", time.monotonic()
        interval, longest = POLL_SECONDS
        while status["phase"] not in ENDED:
            if (line := progress_line(status)) != shown:
                print(shown := line, flush=True)
            time.sleep(interval)
            interval = min(1.3 * interval, longest)
            try:
                status, answered = self.status(), time.monotonic()
            except Unavailable:
                if time.monotonic() - answered > LOST_SECONDS:
                    raise
        return status

    def _request(self, method: str, route: str, body: str | None = None) -> dict[str, Any]:
        with send_request(self._url, method, route, body, headers=self._headers, timeout=TIMEOUT_SECONDS) as response:
            self._check(response)
            text = b"".join(read_lines(response, self._url))
        try:
            status = json.loads(text)
            return {name: status[name] for name in STATUS_FIELDS}
        except (ValueError, KeyError, TypeError):
            raise self._another_server() from None

    def _check(self, response: http.client.HTTPResponse) -> None:
        url = self._url.geturl()
        if response.status in (401, 403):
            raise UserError(f"the server at {url} refused: {error_message(response)}; give the key by --api-key")
        if response.status == 503:
            raise Unavailable(error_message(response))
        if response.status >= 500:
            raise EagleRayError(error_message(response))
        if response.status not in (200, 202):
            raise UserError(f"the server at {url} refused ({response.status}): {error_message(response)}")

    def _another_server(self) -> UserError:
        return UserError(f"the server at {self._url.geturl()} is no eagleray server, or is one of another version")


def progress_line(status: Mapping[str, Any]) -> str:
    waiting = status["waiting_for"]
    return f"{status['phase']}: {waiting}" if waiting else f"{status['phase']}"


def outcome_line(status: Mapping[str, Any]) -> str:
    """Describe an operation that has ended, and what runs now."""
    now = f"the engines are {', '.join(map(str, status['participating_ranks']))}"
    if servers := status["active_api_server_count"]:
        now += f", with {servers} API server{'s' if servers > 1 else ''}"
    if status["phase"] == "idle":
        return f"there was no operation yet: {now}"
    if status["phase"] == "failed":
        return f"failed after {status['seconds']:.1f} s: {status['last_error']}; {now}"
    return f"completed in {status['seconds']:.1f} s: {now}"


def run_operation(operation: FleetOperation, route: str, fields: Mapping[str, Any], *, waits: bool) -> int:
    """Begin an operation, and follow it to its end if `waits`. Returns the exit code: 1 for one that failed."""
    status = operation.begin(route, fields)
    hint = f"`eagleray scale --status --operation-id {status['operation_id']}` shows its progress"
    if not waits and status["phase"] not in ENDED:
        print(f"{progress_line(status)}\n{hint}")
        return 0
    try:
        status = operation.follow(status)
    except KeyboardInterrupt:
        print(f"the operation goes on: {hint}")
        raise
    print(outcome_line(status))
    return 1 if status["phase"] == "failed" else 0


def _first_admin_key() -> str | None:
    keys = divided_keys(os.environ.get(ADMIN_API_KEY_VARIABLE, ""))
    return keys[0] if keys else None
