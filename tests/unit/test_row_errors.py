"""Errors of a prompt among several have its index."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from eagleray.errors import RequestFailed
from eagleray.generation_calls import GenerationCalls
from eagleray.messages.sampling import RequestOutputKind
from eagleray.streaming import OutputCollector


class FakeStream:
    """A request that does not finish, or fails while it runs."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    async def result(self):
        if not self._fails:
            await asyncio.Event().wait()
        raise RequestFailed("its engine exited too often")

    def set_on_output(self, on_output):
        pass

    def pop_delta(self):
        if self._fails:
            raise RequestFailed("its engine exited too often")

    def abort(self):
        pass


class FakeInstance:
    async def guard(self, work):
        return await work


def sent(*fails: bool):
    return [(FakeStream(fails=one), RequestOutputKind.CUMULATIVE) for one in fails]


CASES = [([False, True], "^prompt 1: its engine exited"), ([True], "^its engine exited")]


@pytest.mark.parametrize(("fails", "message"), CASES)
def test_finish_request_that_fails_among_several_is_named(fails, message):
    calls = GenerationCalls(FakeInstance(), Mock())
    with pytest.raises(RequestFailed, match=message):
        asyncio.run(asyncio.wait_for(calls.finish(sent(*fails), "raise", False), 10))


@pytest.mark.parametrize(("fails", "message"), CASES)
def test_collector_stream_that_fails_among_several_is_named(fails, message):
    async def collect():
        collector = OutputCollector()
        collector.add(dict(enumerate(sent(*fails))))
        await collector.next()

    with pytest.raises(RequestFailed, match=message):
        asyncio.run(asyncio.wait_for(collect(), 10))
