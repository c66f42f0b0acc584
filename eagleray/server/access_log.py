"""A line of the log for each HTTP request: method, path, status, time, tokens and id; never texts or tokens.

Owned by the middleware, which calls it when an answer has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from starlette.types import Scope

from eagleray.config.serving import ServingConfig
from eagleray.log import get_logger
from eagleray.server.paths import normalized

logger = get_logger(__name__)

USAGE = "usage"
"""Key of a request's state with the tokens of its prompts and completions, if it generates."""

MAX_PATH_CHARS = 200


class AccessLog:
    """Writes the lines, except for routes that the option `disable_access_log_for_endpoints` names.

    Probes, scrapes and pages come to `polled_paths` every few seconds, so these have lines only if the answer is an
    error.
    """

    def __init__(self, options: ServingConfig, polled_paths: Collection[str]) -> None:
        self._is_on = not options.disable_uvicorn_access_log and logger.isEnabledFor(logging.INFO)
        named = (options.disable_access_log_for_endpoints or "").split(",")
        self._silent = frozenset(normalized(path.strip(), "") for path in named if path.strip())
        self._polled_paths = frozenset(polled_paths)

    def write(self, scope: Scope, route: str, status: int, seconds: float, request_id: str) -> None:
        """Log a request to `route`, the pattern of its path, that was answered after these seconds."""
        if not self._is_on or route in self._silent or (status < 400 and route in self._polled_paths):
            return
        entry = {"request_id": request_id, "method": scope["method"], "path": _path(scope), "status": status}
        entry["milliseconds"] = round(1000 * seconds, 1)
        tokens = ""
        if (usage := scope["state"].get(USAGE)) is not None:
            entry |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
            tokens = " %(prompt_tokens)d+%(completion_tokens)d tokens"
        logger.info(f"%(method)s %(path)s %(status)d %(milliseconds).1f ms{tokens} %(request_id)s", entry, extra=entry)


def _path(scope: Scope) -> str:
    """Return the path as the client wrote it, without the query, which may have secrets. It is one line of ASCII."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    text = raw.split(b"?", 1)[0].decode("ascii", "backslashreplace")
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= MAX_PATH_CHARS else f"{shown[:MAX_PATH_CHARS]}…"
