"""The control calls of a client in flight, and the commands that clients execute. Owned by the client."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import Any

from eagleray import errors
from eagleray.client.field_checks import check_seconds
from eagleray.client.in_flight import InFlightRequests
from eagleray.errors import DeadlineExceeded, EagleRayError, InvalidRequest, RequestFailed
from eagleray.identity import ClientId
from eagleray.messages.control import (
    AbortRequests,
    Command,
    CommandDone,
    ControlCall,
    ControlRequest,
    ControlReturned,
    SetState,
)
from eagleray.messages.failure import Failure
from eagleray.messages.plain import unpack
from eagleray.messages.scaling import FleetRequest

DEFAULT_TIMEOUT_SECONDS = 600.0
"""Default timeout of a call."""

REPORT_SECONDS = 5.0
"""Time after the deadline for the supervisor's answer, which names the members that have not replied."""


class ControlCalls:
    """The calls of one client. `send` queues a message for the supervisor and never blocks."""

    def __init__(self, client: ClientId, *, send: Callable[[ControlCall], None]) -> None:
        self._client = client
        self._send = send
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def call(
        self, request: ControlRequest | FleetRequest, *, timeout: float | None, operation_id: str | None
    ) -> dict[str, Any]:
        """Send a call and return its answer, see `Client.control`."""
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        check_seconds(seconds)
        call_id = next(self._ids)
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answered
        try:
            self._send(
                ControlCall(
                    client=self._client,
                    call_id=call_id,
                    operation_id=operation_id or secrets.token_hex(16),
                    request=request,
                    timeout=seconds,
                )
            )
            async with asyncio.timeout(seconds + REPORT_SECONDS):
                return await answered
        except TimeoutError as error:
            if isinstance(error, EagleRayError):
                raise
            raise DeadlineExceeded(f"the supervisor has not answered within {seconds:g} s") from None
        finally:
            del self._calls[call_id]

    def deliver(self, returned: ControlReturned) -> None:
        """Deliver an answer, or drop it if its caller was cancelled or timed out."""
        answered = self._calls.get(returned.call_id)
        if answered is None or answered.done():
            return
        if returned.failure is None:
            answered.set_result(unpack(returned.answer))
        else:
            _set_error(answered, _as_error(returned.failure))

    def fail(self, error: EagleRayError) -> None:
        """Fail all calls."""
        for answered in self._calls.values():
            if not answered.done():
                _set_error(answered, error)


def execute(command: Command, client: ClientId, in_flight: InFlightRequests) -> CommandDone:
    """Execute a command for clients, and return the reply."""
    match command.body:
        case AbortRequests(request_ids=request_ids):
            return CommandDone(
                member=client, number=command.number, result={"aborted": in_flight.abort_matching(request_ids)}
            )
        case SetState():
            return CommandDone(member=client, number=command.number)  # the client has adopted it
        case _:
            failure = Failure.of(InvalidRequest(f"clients do not execute {type(command.body).__name__}"))
            return CommandDone(member=client, number=command.number, failure=failure)


def _set_error(answered: asyncio.Future[dict[str, Any]], error: EagleRayError) -> None:
    answered.set_exception(error)
    answered.exception()  # marked as retrieved: the caller may have been cancelled, and asyncio would log it


def _as_error(failure: Failure) -> EagleRayError:
    """Return the original exception, or `RequestFailed` for an exception that this package does not define."""
    kind = getattr(errors, failure.kind, None) if failure.kind else None
    if isinstance(kind, type) and issubclass(kind, EagleRayError):
        error: EagleRayError = kind(failure.message)
        if isinstance(error, InvalidRequest):
            error.param = failure.param
        return error
    return RequestFailed(str(failure))
