"""The calls of worker extensions in flight: from the moment they are sent until somebody knows what became of them.

The client calls, delivers and fails; this keeps the books and wakes the callers.
"""

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

CALL_SECONDS = 600.0
"""What a call of a worker extension gets if its caller does not say."""

ANSWER_SECONDS = 2.0
"""An engine that gives a call up says which ranks it waited for: how much longer to wait for that word."""


@dataclass(frozen=True, slots=True, eq=False)
class RpcCall:
    """A call in flight."""

    call_id: int
    engine: EngineId
    method: str
    _returned: asyncio.Future[list[bytes]]

    async def result(self, timeout: float) -> list[Any]:
        """What the method returned, in order of rank. Raises what became of the call instead.

        `timeout`: seconds. Raises `DeadlineExceeded` after them.
        """
        try:
            async with asyncio.timeout(timeout):
                values = await self._returned
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):  # the engine's own word
                raise
            raise DeadlineExceeded(
                f"`{self.method}` on the workers: no answer from {self.engine.label} within {timeout:g} s"
            ) from None
        return [unpack(value) for value in values]

    def settle(self, returned: WorkersReturned) -> None:
        if self._returned.done():
            return
        if returned.failure is not None:
            self.fail(_error(self.method, returned.failure, returned.rank, self.engine))
        else:
            self._returned.set_result(returned.values)

    def fail(self, error: EagleRayError) -> None:
        if not self._returned.done():
            self._returned.set_exception(error)
            self._returned.exception()  # of several calls that fail one is raised: nobody asks for the others


class RpcCalls:
    """`send` hands a message to an engine and never blocks."""

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
        """Call `method` on every worker of these engines -> what each returned, engine by engine, in order of rank.

        Raises what became of the first call that failed; see `Client.call_workers`.
        """
        check_text(method, "method")
        seconds = CALL_SECONDS if timeout is None else timeout
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
            return await _results(calls, seconds + ANSWER_SECONDS)

    @contextmanager
    def _open(self, engine: EngineId, method: str) -> Iterator[RpcCall]:
        """A call that is in flight within the block; what is said of it later is nobody's."""
        call = RpcCall(next(self._ids), engine, method, asyncio.get_running_loop().create_future())
        self._calls[call.call_id] = call
        try:
            yield call
        finally:
            del self._calls[call.call_id]

    def deliver(self, returned: WorkersReturned) -> None:
        if call := self._calls.get(returned.call_id):
            call.settle(returned)

    def fail(self, error: EagleRayError, *, engine: EngineId | None = None) -> None:
        """Fail those of `engine`; None: all."""
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
