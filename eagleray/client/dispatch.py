"""Brings requests to engines, and on to others when their engine is gone. Nothing else sends a request.

Owned by the client, which tells it what engines say and who comes and goes. A request is with one engine, or waits for
one: while it waits, and when it goes on, its reader notices nothing but the time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from eagleray.client.in_flight import ClientRequest, InFlightRequests
from eagleray.client.recovery import NoObserver, RecoveryObserver
from eagleray.client.routing.router import Router
from eagleray.client.stream import RequestStream
from eagleray.errors import DeadlineExceeded, EngineFailed
from eagleray.identity import ClientId, EngineId
from eagleray.log import get_logger
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import Chunk
from eagleray.messages.requests import Abort, Generate

logger = get_logger(__name__)


class Dispatch:
    """`send` hands a message to an engine and never blocks. `clock`: seconds, from any origin."""

    def __init__(
        self,
        client: ClientId,
        *,
        router: Router,
        send: Callable[[EngineId, Generate | Abort], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.observer: RecoveryObserver = NoObserver()
        self.in_flight = InFlightRequests(self)
        self._client = client
        self._router = router
        self._members = router.members
        self._send = send
        self._clock = clock

    def start(self, request: ClientRequest) -> RequestStream:
        """A new request: it goes to an engine, or waits for one. Its time begins to run.

        Raises `InvalidRequest` for a rank that does not exist, `Unavailable` for one that was given up, and what
        `send` raises; then it is not in flight.
        """
        self._place(request)
        if request.timeout is not None:
            request.timer = asyncio.get_running_loop().call_later(request.timeout, self._expire, request)
        return self.in_flight.add(request)

    def deliver(self, engine: EngineId, chunks: Sequence[Chunk]) -> None:
        """What a step of the engine brought."""
        if unwanted := self.in_flight.deliver(engine, chunks):
            self._send(engine, Abort(self._client, unwanted))

    def join(self, engine: EngineId, info: EngineInfo) -> None:
        """An engine can be sent to. What waited for one goes there."""
        self._router.join(engine, info)
        num_placed = len(self._place_all(self.in_flight.waiting))
        parked = f"; {num_placed} requests that waited for an engine go to it" if num_placed else ""
        logger.info("%s has joined%s", engine.label, parked)

    def leave(self, engine: EngineId, *, cause: str, returns: bool) -> None:
        """An engine is gone, or failed before it had joined. What was with it goes on elsewhere, waits, or fails."""
        message = f"{engine.label} ended: {cause}"
        self._router.leave(engine, cause=message, returns=returns)
        now = self._clock()
        num_before = len(self.in_flight)
        for request in self.in_flight.detach(engine):
            request.lost_at = now if request.lost_at is None else request.lost_at
            if failure := request.deaths.charge(message):
                self.in_flight.fail(request, failure)
        for request in self.in_flight.waiting:
            if not self._may_come(request):
                self.in_flight.fail(request, EngineFailed(message))
        num_given_up = num_before - len(self.in_flight)
        self._count_given_up(num_given_up)
        num_placed = len(self._place_all(self.in_flight.waiting))
        num_waiting = len(self.in_flight.waiting)
        logger.log(
            logging.WARNING if num_before else logging.DEBUG,  # without requests it is the supervisor's news alone
            "%s is lost: %s; %d requests go on elsewhere, %d wait for an engine, %d are given up",
            engine.label,
            cause,
            num_placed,
            num_waiting,
            num_given_up,
        )

    def fail(self, cause: str) -> None:
        """There are no engines any more, and there will be none: nothing goes on."""
        self._router.end(cause)
        requests = list(self.in_flight)
        for request in requests:
            self.in_flight.fail(request, EngineFailed(cause))
        self._count_given_up(len(requests))

    # What `in_flight` tells.

    def on_abort(self, request: ClientRequest) -> None:
        if request.engine is not None:
            self._send(request.engine, Abort(self._client, request.names))

    def on_fresh(self, request: ClientRequest, chunk: Chunk) -> None:
        request.deaths.was_started(has_token=bool(chunk.token_ids))
        if request.sending is not None and not chunk.is_started:
            # Prompt log-probabilities need a computed prompt: then the cache was not asked for all it has.
            asks = request.message.sampling.prompt_logprobs is None
            self._router.started(request.sending, chunk.num_cached_tokens if asks else None)
            request.sending = None
        if chunk.token_ids:
            request.is_fresh = False
            if request.lost_at is not None:
                self.observer.next_token(self._clock() - request.lost_at)
                request.lost_at = None

    def on_ended(self, request: ClientRequest, count: int) -> None:
        if request.sending is not None:
            self._router.started(request.sending, None)
            request.sending = None
        if request.engine is not None:
            self._router.ended(request.engine, count)

    def _expire(self, request: ClientRequest) -> None:
        self.on_abort(request)
        message = f"the request was given up after {request.timeout:g} s (`timeout`): {request.progress}"
        self.in_flight.fail(request, DeadlineExceeded(message))

    # Sending.

    def _place(self, request: ClientRequest) -> bool:
        """Send it to an engine, if there is one for it now."""
        choice = self._router.choose(
            request.state.prompt_token_ids,
            cache_salt=request.message.cache_salt,
            session=request.session,
            rank=request.rank,
        )
        if choice is None:
            return False
        self._send_all(choice.engine, request.next_messages())
        self.in_flight.assign(request, self._router.sent(choice, len(request.running)))
        return True

    def _send_all(self, engine: EngineId, messages: Sequence[Generate]) -> None:
        """Send all of them, or leave none behind."""
        try:
            for message in messages:
                self._send(engine, message)
        except BaseException:
            # The request does not get in flight: nobody else would end what the engine has of it.
            self._send(engine, Abort(self._client, [message.request_id for message in messages]))
            raise

    def _place_all(self, requests: Iterable[ClientRequest]) -> list[ClientRequest]:
        """Send those for which there is an engine."""
        placed = [request for request in requests if self._place(request)]
        resumed = [request for request in placed if request.lost_at is not None]
        if resumed:
            self.observer.resumed(len(resumed), sum(request.num_tokens for request in resumed))
        return placed

    def _may_come(self, request: ClientRequest) -> bool:
        """Whether there is an engine for it, or will be."""
        ranks = self._members.ranks
        return bool(ranks) if request.rank is None else request.rank in ranks

    def _count_given_up(self, count: int) -> None:
        if count:
            self.observer.given_up(count)
