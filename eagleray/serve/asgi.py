"""ASGI middleware for an application behind Serve's proxy."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = b"x-request-id"


class BehindProxy:
    """ASGI middleware that leaves the request id out of answers: Serve's proxy adds it to request and answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [entry for entry in message.get("headers", ()) if entry[0].lower() != REQUEST_ID]
            await send(message)

        await self._app(scope, receive, send_without_id)
