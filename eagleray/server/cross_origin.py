"""Rules by which pages of other origins may use the server (CORS): headers of answers, and preflight requests.

A browser asks by a preflight request, which has no key, whether a page may send a request, and shows the page an answer
only if the answer allows it. Pure; driven by the middleware, and by the protocol for requests that it refuses itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers

from eagleray.config.serving import ServingConfig
from eagleray.server.error_responses import ORIGIN_REFUSED, RefusedRequest

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
SAFE_HEADERS = ("accept", "accept-language", "content-language", "content-type")
"""Headers that a page may send in any case, of which browsers name some in a preflight nevertheless."""

EXPOSED_HEADERS = b"X-Request-Id, Retry-After, X-Eagleray-Ignored"
"""Headers of answers that pages may read in addition to the few that browsers always show them."""

PREFLIGHT_SECONDS = "600"
"""Time for which a browser remembers the answer to a preflight request."""

RawHeaders = list[tuple[bytes, bytes]]


class CrossOrigin:
    """The rules of one server, from its options `allowed_origins`, `allowed_methods`, `allowed_headers` and
    `allow_credentials`."""

    def __init__(self, options: ServingConfig) -> None:
        self._origins = {origin.rstrip("/").lower() for origin in options.allowed_origins}
        methods = tuple(method.upper() for method in options.allowed_methods)
        self._methods = METHODS if not methods or "*" in methods else methods
        self._headers = {*SAFE_HEADERS, *(name.lower() for name in options.allowed_headers or "*")}
        self._has_credentials = options.allow_credentials
        self._shows_origin = self._has_credentials or "*" not in self._origins

    def answer_headers(self, request_headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
        """Return the headers that an answer to a request with these headers gets, in lower case."""
        if not self._origins:
            return []
        headers = [(b"vary", b"Origin")] if self._shows_origin else []
        origin = next((value for name, value in request_headers if name == b"origin"), None)
        if origin is None or not self._allows(origin.decode("latin-1")):
            return headers
        headers.append((b"access-control-allow-origin", origin if self._shows_origin else b"*"))
        headers.append((b"access-control-expose-headers", EXPOSED_HEADERS))
        if self._has_credentials:
            headers.append((b"access-control-allow-credentials", b"true"))
        return headers

    def preflight(self, headers: Headers) -> dict[str, str]:
        """Return the headers that allow the request which a preflight request announces, beside `answer_headers`.

        Raises `RefusedRequest` with the reason if the request is not allowed.
        """
        origin, method = headers["origin"], headers["access-control-request-method"]
        names = [name.strip() for name in headers.get("access-control-request-headers", "").split(",") if name.strip()]
        if not self._allows(origin):
            raise _refused(f"pages of {origin} may not use this server", "allowed-origins")
        if method.upper() not in self._methods:
            raise _refused(f"pages of other origins may not use the method {method}", "allowed-methods")
        for name in names:
            if "*" not in self._headers and name.lower() not in self._headers:
                raise _refused(f"pages of other origins may not send the header {name}", "allowed-headers")
        allowed = {
            "access-control-allow-methods": ", ".join(self._methods),
            "access-control-max-age": PREFLIGHT_SECONDS,
        }
        return allowed | ({"access-control-allow-headers": ", ".join(names)} if names else {})

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins


def is_preflight(headers: Headers) -> bool:
    """Whether a browser asks by this request, whose method is OPTIONS, if a page may send another one."""
    return "origin" in headers and "access-control-request-method" in headers


def _refused(reason: str, option: str) -> RefusedRequest:
    return RefusedRequest(f"{reason}; its operator may allow it by `--{option}`", ORIGIN_REFUSED)
