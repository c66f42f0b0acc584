"""The calls of worker extensions in flight, from sending to result. Owned by the client."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from eagleray.client.field_checks import check_seconds, check_text
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


class RpcCall(NamedTuple):
    """A call in flight on one engine."""

    engine: EngineId
    method: str
    returned: asyncio.Future[list[bytes]]
    """The encoded results of the workers, in order of rank."""


class RpcCalls:
    """The calls of one client. `send` queues a message for an engine and never blocks."""

    def __init__(self, client: ClientId, *, send: Callable[[EngineId, CallWorkers], None]) -> None:
        self._client = client
        self._send = send
        self._ids = itertools.count(1)
        self._calls: dict[int, RpcCall] = {}
        self.on_done: Callable[[Sequence[EngineId]], None] = lambda engines: None
        """Called with the engines of a call that has ended."""

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
        as_torch: bool = True,
    ) -> list[Any]:
        """Call `method` on every worker of these engines, and return the results by engine, then by rank.

        `as_torch`: see `messages.plain.unpack`.

        Raises the error of the first call that failed; see `Client.call_workers`.
        """
        if callable(method):
            raise InvalidRequest(
                "`method` is a function, and none is sent to workers, because that needs pickle: make it a method of "
                "your worker extension (option `worker_extension_cls`), and give its name",
                param="method",
            )
        check_text(method, "method")
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        check_seconds(seconds)
        try:
            arguments = pack_arguments(args, kwargs)
        except TypeError as error:
            raise InvalidRequest(str(error), param="args") from None
        loop = asyncio.get_running_loop()
        calls = {next(self._ids): RpcCall(engine, method, loop.create_future()) for engine in engines}
        self._calls |= calls
        try:
            for call_id, call in calls.items():
                message = CallWorkers(
                    client=self._client, call_id=call_id, method=method, arguments=arguments, timeout=seconds
                )
                self._send(call.engine, message)
            values = await _gather(list(calls.values()), seconds)
        finally:
            for call_id in calls:  # replies that arrive later are dropped
                del self._calls[call_id]
            self.on_done(engines)
        return [unpack(value, as_torch=as_torch) for engine_values in values for value in engine_values]

    def are_on(self, engine: EngineId) -> bool:
        """Whether a call is in flight on the engine."""
        return any(call.engine == engine for call in self._calls.values())

    def deliver(self, returned: WorkersReturned) -> None:
        call = self._calls.get(returned.call_id)
        if call is None or call.returned.done():
            return
        if returned.failure is not None:
            _fail(call, _error(call.method, returned.failure, returned.rank, call.engine))
        else:
            call.returned.set_result(returned.values)

    def fail(self, error: EagleRayError, *, engine: EngineId | None = None) -> None:
        """Fail the calls on `engine`; None: on all engines."""
        for call in self._calls.values():
            if engine is None or call.engine == engine:
                _fail(call, error)


async def _gather(calls: Sequence[RpcCall], seconds: float) -> list[list[bytes]]:
    """Wait for all calls, which the engines give up after `seconds`."""
    try:
        async with asyncio.timeout(seconds + REPORT_SECONDS):
            return await asyncio.gather(*(call.returned for call in calls))
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):  # reported by an engine, with the ranks that it waited for
            raise
        late = next((call for call in calls if call.returned.cancelled()), calls[0])
        raise DeadlineExceeded(
            f"`{late.method}` on the workers: no answer from {late.engine.label} within {seconds + REPORT_SECONDS:g} s"
        ) from None


def _fail(call: RpcCall, error: EagleRayError) -> None:
    if not call.returned.done():
        call.returned.set_exception(error)
        # Only one of several failed calls is raised: retrieve the others, or asyncio would log them.
        call.returned.exception()


def _error(method: str, failure: Failure, rank: int | None, engine: EngineId) -> EagleRayError:
    if failure.is_user_error:
        return InvalidRequest(failure.message, param="method")
    if rank is None:
        kind = DeadlineExceeded if failure.kind == DeadlineExceeded.__name__ else RequestFailed
        return kind(f"`{method}` on the workers: {failure.message}")
    error = RequestFailed(f"`{method}` raised on rank {rank}: {failure}")
    error.add_note(f"On the worker of rank {rank} of {engine.label}:\n{failure.traceback}")
    return error
