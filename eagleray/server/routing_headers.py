"""The headers that say which engine gets a request."""

from __future__ import annotations

import re
from typing import Any

from starlette.datastructures import Headers

from eagleray.errors import InvalidRequest

RANK = "X-data-parallel-rank"
SESSION = "X-Session-ID"
NUMBER = re.compile(r"[0-9]{1,9}")
MAX_SESSION_CHARS = 256
SESSION_NAME = re.compile(r"[\x21-\x7e]{1,256}")


def routing_headers(ranks: range) -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of the headers, for a server that has engines of these ranks."""
    return {
        RANK: {
            "type": "integer",
            "minimum": ranks[0],
            "maximum": ranks[-1],
            "description": "Rank of the engine that the request must go to.",
        },
        SESSION: {
            "type": "string",
            "pattern": f"^{SESSION_NAME.pattern}$",
            "description": "Name of a session. Its requests go to the same engine.",
        },
    }


def requested_rank(headers: Headers, ranks: range) -> int | None:
    """Return the rank, one of `ranks`, that the request must go to; None: any.

    Raises `InvalidRequest` for another rank, because a user who names an engine must not get a different one.
    """
    given = headers.get(RANK)
    if given is None:
        return None
    if not NUMBER.fullmatch(given) or int(given) not in ranks:
        several = f"engines of the ranks {ranks[0]} to {ranks[-1]}"
        here = several if len(ranks) > 1 else f"one engine, of rank {ranks[0]}"
        raise InvalidRequest(f"header {RANK}: there is no rank {given[:20]!r} here; this server has {here}", param=RANK)
    return int(given)


def session_name(field: str | None, headers: Headers) -> str | None:
    """Return the name of the request's session, if it has one: its `field`, or else its header.

    Raises `InvalidRequest`.
    """
    given = headers.get(SESSION)
    if given is not None and not SESSION_NAME.fullmatch(given):
        raise InvalidRequest(f"header {SESSION} must be 1 to 256 visible ASCII characters", param=SESSION)
    if field and len(field) > MAX_SESSION_CHARS:
        raise InvalidRequest(f"`session_id` may have at most {MAX_SESSION_CHARS} characters", param="session_id")
    return field or given
