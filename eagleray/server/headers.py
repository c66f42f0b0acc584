"""What a caller may say in headers: which engine its request goes to, that of a rank or of its session; and in which
form it would like the answer."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from eagleray.errors import InvalidRequest

MSGPACK = "application/msgpack"

RANK = "X-data-parallel-rank"
SESSION = "X-Session-ID"
ROUTING_HEADERS = {
    RANK: "Rank of the engine that the request must go to.",
    SESSION: "Name of a session, up to 256 visible ASCII characters. Its requests go to the same engine.",
}

NUMBER = re.compile(r"[0-9]{1,9}")
SESSION_NAME = re.compile(r"[\x21-\x7e]{1,256}")


def rank_of(headers: Headers, ranks: range) -> int | None:
    """The rank that the request must go to, one of `ranks`; None: any.

    Raises `InvalidRequest` for another: a caller that names an engine must not get a different one.
    """
    given = headers.get(RANK)
    if given is None:
        return None
    if not NUMBER.fullmatch(given) or int(given) not in ranks:
        several = f"engines of the ranks {ranks[0]} to {ranks[-1]}"
        here = several if len(ranks) > 1 else f"one engine, of rank {ranks[0]}"
        raise InvalidRequest(f"header {RANK}: there is no rank {given[:20]!r} here; this server has {here}", param=RANK)
    return int(given)


def session_of(headers: Headers) -> str | None:
    """Name of the session that the request belongs to. Raises `InvalidRequest`."""
    given = headers.get(SESSION)
    if given is not None and not SESSION_NAME.fullmatch(given):
        raise InvalidRequest(f"header {SESSION} must be 1 to 256 visible ASCII characters", param=SESSION)
    return given


def accepts(headers: Headers, kind: str) -> bool:
    """Whether the caller asks for answers of this media type by its name."""
    names = (part.partition(";")[0].strip().lower() for part in headers.get("accept", "").split(","))
    return kind in names
