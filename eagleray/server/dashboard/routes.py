"""/dashboard: the live page, and the document of state that it shows.

The page has no data in it and needs no key, so that a browser can load it; it asks for the key and sends it with the
request for the data. Everything is in one answer, so that the page works below any path at which a proxy shows it.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from eagleray.config.sections import Config
from eagleray.server.dashboard.feed import DashboardFeed
from eagleray.server.dashboard.state import DashboardState
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import EventStream, accepts, json_response
from eagleray.server.service import Service

FILES = resources.files("eagleray.server.dashboard") / "page"


class DashboardRoutes:
    def __init__(self, service: Service, config: Config) -> None:
        self._feed = DashboardFeed(service, config)
        style, script = (FILES.joinpath(name).read_text("utf-8") for name in ("style.css", "script.js"))
        page = FILES.joinpath("page.html").read_text("utf-8")
        self._page = page.replace("{{style}}", style).replace("{{script}}", script).encode()
        self._headers = {
            "content-type": "text/html; charset=utf-8",
            "cache-control": "no-cache",
            "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'; "
            f"style-src '{_hash(style)}'; script-src '{_hash(script)}'",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    def endpoints(self) -> list[Endpoint]:
        page = Operation(self.show_page, "A page that shows the instance live, in HTML.")
        state = Operation(
            self.show_state,
            "The instance now; a stream of it for requests that accept text/event-stream.",
            response=DashboardState,
            stream_event=DashboardState,
            error_statuses=(503,),
        )
        return [Endpoint("/dashboard", is_open=True, get=page), Endpoint("/dashboard/state", is_polled=True, get=state)]

    async def show_page(self, request: Request) -> Response:
        return Response(self._page, headers=self._headers)

    async def show_state(self, request: Request) -> ASGIApp:
        if request.method == "HEAD" or not accepts(request.headers, "text/event-stream"):
            return json_response(self._feed.read())
        return EventStream(self._feed.stream, request.scope["state"]["request_id"])


def _hash(text: str) -> str:
    """Return the source by which a content security policy allows an inline script or style of this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
