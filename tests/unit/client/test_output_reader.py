"""A reader of outputs in another event loop than the instance's."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from eagleray.client.request import RequestStream
from eagleray.instance import InstanceThread
from eagleray.messages.sampling import RequestOutputKind
from eagleray.streaming import OutputReader


class FailedStream:
    """A stream whose request has failed."""

    def pop_delta(self) -> None:
        raise ValueError("failed")


class ClosingLoop:
    """A loop that another thread closes after it was asked."""

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, *_: Any) -> None:
        raise RuntimeError("Event loop is closed")


def test_output_reader_whose_loop_is_closed_meanwhile_does_not_fail_the_instance() -> None:
    async def answer() -> None:
        stream, thread = cast(RequestStream, FailedStream()), cast(InstanceThread, None)
        reader = OutputReader(stream, RequestOutputKind.DELTA, thread)
        reader._own_loop = cast(asyncio.AbstractEventLoop, ClosingLoop())
        reader._ask(asyncio.get_running_loop().create_future())
        assert reader._waiting is None

    asyncio.run(answer())
