"""The calls of worker extensions in flight, from sending to result. Owned by the client."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from eagleray.client.preprocess import check_seconds, check_text
from eagleray.errors import DeadlineExceeded, EagleRayError, InvalidRequest, RequestFailed
from eagleray.identity import ClientId, EngineId
from eagleray.messages.failure import Failure
from eagleray.messages.outputs import WorkersReturned
from eagleray.messages.plain import pack_arguments, unpack
from eagleray.messages.requests import CallWorkers

DEFAULT_TIMEOUT_SECONDS = 600.0
"""Timeout of a call whose caller sets none."""

REPORT_SECONDS = 2.0
"""An engine that gives up a call reports the ranks that it waited for; the client waits this much longer for that."""


@dataclass(frozen=True, slots=True, eq=False)
class RpcCall:
    """A call in flight on one engine."""

    call_id: int
    engine: EngineId
    method: str
    _returned: asyncio.Future[list[bytes]]

    async def result(self, timeout: float) -> list[Any]:
        """Return the results of the workers, in order of rank, or raise the error that the call ended with.

        Raises `DeadlineExceeded` after `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                values = await self._returned
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):  # reported by the engine, with the ranks
                raise
            raise DeadlineExceeded(
                f"`{self.method}` on the workers: no answer from {self.engine.label} within {timeout:g} s"
            ) from None
        return [unpack(value) for value in values]

    def set_result(self, returned: WorkersReturned) -> None:
        if self._returned.done():
            return
        if returned.failure is not None:
            self.fail(_error(self.method, returned.failure, returned.rank, self.engine))
        else:
            self._returned.set_result(returned.values)

    def fail(self, error: EagleRayError) -> None:
        if not self._returned.done():
            self._returned.set_exception(error)
            # Only one of several failed calls is raised: retrieve the others, or asyncio would log them.
            self._returned.exception()


class RpcCalls:
    """The calls of one client. `send` queues a message for an engine and never blocks."""

    def __init__(self, client: ClientId, *, send: Callable[[EngineId, CallWorkers], None]) -> None:
        self._client = client
        self._send = send
        self._ids = itertools.count(1)
        self._calls: dict[int, RpcCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def call(
        self,
        engines: Sequence[EngineId],
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        *,
        timeout: float | None,
    ) -> list[Any]:
        """Call `method` on every worker of these engines, and return the results by engine, then by rank.

        Raises the error of the first call that failed; see `Client.call_workers`.
        """
        check_text(method, "method")
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        check_seconds(seconds)
        try:
            arguments = pack_arguments(args, kwargs)
        except TypeError as error:
            raise InvalidRequest(str(error), param="args") from None
        with ExitStack() as stack:
            calls = [stack.enter_context(self._open(engine, method)) for engine in engines]
            for call in calls:
                message = CallWorkers(
                    client=self._client, call_id=call.call_id, method=method, arguments=arguments, timeout=seconds
                )
                self._send(call.engine, message)
            return await _results(calls, seconds + REPORT_SECONDS)

    @contextmanager
    def _open(self, engine: EngineId, method: str) -> Iterator[RpcCall]:
        """Register a call for the duration of the block; replies that arrive after it are dropped."""
        call = RpcCall(next(self._ids), engine, method, asyncio.get_running_loop().create_future())
        self._calls[call.call_id] = call
        try:
            yield call
        finally:
            del self._calls[call.call_id]

    def deliver(self, returned: WorkersReturned) -> None:
        if call := self._calls.get(returned.call_id):
            call.set_result(returned)

    def fail(self, error: EagleRayError, *, engine: EngineId | None = None) -> None:
        """Fail the calls on `engine`; None: on all engines."""
        for call in self._calls.values():
            if engine is None or call.engine == engine:
                call.fail(error)


async def _results(calls: Sequence[RpcCall], timeout: float) -> list[Any]:
    tasks = [asyncio.create_task(call.result(timeout)) for call in calls]
    try:
        return list(chain.from_iterable(await asyncio.gather(*tasks)))
    finally:
        for task in tasks:
            task.cancel()


def _error(method: str, failure: Failure, rank: int | None, engine: EngineId) -> EagleRayError:
    if failure.is_user_error:
        return InvalidRequest(failure.message, param="method")
    if rank is None:
        kind = DeadlineExceeded if failure.kind == DeadlineExceeded.__name__ else RequestFailed
        return kind(f"`{method}` on the workers: {failure.message}")
    error = RequestFailed(f"`{method}` raised on rank {rank}: {failure}")
    error.add_note(f"On the worker of rank {rank} of {engine.label}:\n{failure.traceback}")
    return error
