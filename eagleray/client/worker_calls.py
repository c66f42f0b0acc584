"""The calls of worker extensions in flight: from the moment they are sent until somebody knows what became of them.

The client opens, delivers and fails; this keeps the books and wakes the callers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from eagleray.errors import DeadlineExceeded, EagleRayError, InvalidRequest, RequestFailed
from eagleray.identity import EngineId
from eagleray.messages.failure import Failure
from eagleray.messages.outputs import WorkersReturned
from eagleray.messages.plain import unpack

__all__ = ["WorkerCall", "WorkerCalls"]


@dataclass(frozen=True, slots=True, eq=False)
class WorkerCall:
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
            self._returned.set_exception(_error(self.method, returned.failure, returned.rank))
        else:
            self._returned.set_result(returned.values)

    def fail(self, error: EagleRayError) -> None:
        if not self._returned.done():
            self._returned.set_exception(error)


class WorkerCalls:
    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._calls: dict[int, WorkerCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def open(self, engine: EngineId, method: str) -> Iterator[WorkerCall]:
        """A call that is in flight within the block; what is said of it later is nobody's."""
        call = WorkerCall(next(self._ids), engine, method, asyncio.get_running_loop().create_future())
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


def _error(method: str, failure: Failure, rank: int | None) -> EagleRayError:
    if failure.is_user_error:
        return InvalidRequest(failure.message, param="method")
    if rank is None:
        kind = DeadlineExceeded if failure.kind == DeadlineExceeded.__name__ else RequestFailed
        return kind(f"`{method}` on the workers: {failure.message}")
    error = RequestFailed(f"`{method}` raised on rank {rank}: {failure}")
    error.add_note(f"On the worker of rank {rank}:\n{failure.traceback}")
    return error
