"""Calls of the application inside a program."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import StreamingResponse

from eagleray.server.app_calls import posted


async def breaking(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("middleware broke")


async def breaking_later(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    raise RuntimeError("the stream broke")


@pytest.mark.parametrize(("app", "said"), [(breaking, "middleware broke"), (breaking_later, "the stream broke")])
def test_posted_application_that_raises_raises_for_the_caller(app: Any, said: str) -> None:
    received: list[bytes] = []

    async def read() -> None:
        async with posted(app, "/", b"{}", headers=[]) as answer:
            assert answer.status == 200, "there is an answer"
            received.extend([part async for part in answer.parts()])

    with pytest.raises(RuntimeError, match=said):
        asyncio.run(read())
    assert received == ([b"one"] if app is breaking_later else [])


def test_posted_leaving_the_block_cancels_the_request() -> None:
    ended: list[str] = []

    async def parts() -> Any:
        try:
            while True:
                yield b"part"
                await asyncio.sleep(0)
        finally:
            ended.append("the stream")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await StreamingResponse(parts())(scope, receive, send)

    async def read_one() -> None:
        async with posted(app, "/", b"{}", headers=[]) as answer:
            async for _ in answer.parts():
                raise LookupError("the caller has enough")

    with pytest.raises(LookupError):
        asyncio.run(read_one())
    assert ended == ["the stream"]
