"""The requests in flight, from start to finish: sends them to engines, and to others when an engine exits.

Owned by the client, which passes on chunks and changes of the membership; nothing else sends a request. A request is
assigned to one engine, or queued here until there is one. The reader of its stream notices an engine exit only as a
pause."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Protocol

from eagleray.client.completion import Completion
from eagleray.client.request import ClientRequest, RequestStream
from eagleray.client.routing.router import Router
from eagleray.errors import DeadlineExceeded, EagleRayError, EngineFailed, Unavailable
from eagleray.identity import ClientId, EngineId
from eagleray.log import get_logger
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import Chunk, Chunks, TokenColumns
from eagleray.messages.requests import Abort, Generate

logger = get_logger(__name__)

SERIAL = re.compile(r"-\d+$")
"""Serial number that an API server adds to the id of a request."""


class RecoveryObserver(Protocol):
    """Callbacks on restarts of requests, called in the event loop of the client.

    A protocol because its implementation counts metrics, and neither `client` nor `metrics` imports the other.
    """

    def on_resumed(self, num_requests: int, num_tokens: int) -> None:
        """Requests were sent to another engine, which computes `num_tokens` again, of prompts and outputs together."""

    def on_next_token(self, seconds: float) -> None:
        """A resumed request got a token, `seconds` after its engine had left."""

    def on_failed(self, num_requests: int) -> None:
        """Requests failed because engines had exited."""


class InFlightRequests:
    """The requests of one client. `send` queues a message for an engine and never blocks. `clock`: in seconds."""

    def __init__(
        self,
        client: ClientId,
        *,
        router: Router,
        send: Callable[[EngineId, Generate | Abort], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.observer: RecoveryObserver | None = None
        self.num_queued_seqs = 0
        """Number of completions of the requests for which no token has come."""
        self.on_drained: Callable[[EngineId], None] = lambda engine: None
        """Called when an engine that drains has none of these requests left."""
        self._client = client
        self._router = router
        self._send = send
        self._clock = clock
        self._requests: dict[str, ClientRequest] = {}
        """The requests by their ids, in order of arrival."""
        self._completions: defaultdict[EngineId, dict[str, tuple[ClientRequest, Completion]]] = defaultdict(dict)
        """The unfinished completions by their engine, and by the id that it knows them under."""
        self.on_first_token: Callable[[ClientRequest], None] = lambda request: None
        """Called when the first token of a request has come."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    @property
    def num_unassigned_seqs(self) -> int:
        """Number of completions of requests that wait here for an engine."""
        return sum(len(request.unfinished) for request in self._queued())

    def num_queued_between(self, begin: float, end: float) -> int:
        """Return the number of requests without a token that arrived between these times of `time.perf_counter`."""
        queued = (request.arrived_at for request in self._requests.values() if request.is_queued)
        return sum(begin <= arrived_at < end for arrived_at in queued)

    def start(self, request: ClientRequest) -> RequestStream:
        """Send a new request to an engine, or queue it until there is one. Its timeout begins to run.

        Raises `InvalidRequest` for a rank that does not exist or was removed, `Unavailable` for one that was given up,
        and whatever `send` raises; then the request is not in flight.
        """
        self._dispatch(request)
        if request.timeout is not None:
            request.timer = asyncio.get_running_loop().call_later(request.timeout, self._time_out, request)
        request.arrival_time, request.arrived_at = time.time(), time.perf_counter()
        self._requests[request.request_id] = request
        self.num_queued_seqs += len(request.completions)
        return RequestStream(request, abort=partial(self.abort, request))

    def deliver(self, message: Chunks) -> None:
        """Deliver the output of a step. That of requests that have finished here, or have moved, is dropped."""
        completions = self._completions.get(message.engine)
        if completions is None:
            return
        unwanted: list[str] = []
        for chunk in message.chunks:
            if (found := completions.get(chunk.request_id)) is not None:
                unwanted += self._deliver(*found, chunk)
        for engine_request_id, token_id in message.tokens.items():
            if (found := completions.get(engine_request_id)) is not None:
                request, completion = found
                completion.append(token_id)
                if completion.finish_reason is None:
                    request.notify_reader(done=False)
                else:
                    unwanted += self._on_finished(request, completion)
        if message.columns is not None:
            unwanted += self._deliver_columns(completions, message.columns)
        if unwanted:
            self._send(message.engine, Abort(self._client, unwanted))

    def abort(self, request: ClientRequest) -> None:
        """End a request with the output that it has."""
        self._abort_in_engine(request)
        request.abort()
        self._remove(request)

    def abort_all(self) -> None:
        for request in list(self._requests.values()):
            self.abort(request)

    def abort_matching(self, request_ids: Sequence[str] | None) -> int:
        """Abort the requests with these ids, as users know them; None: all. Returns their number.

        An API server adds a serial number to a user's id, so an id stands for all requests that were sent with it.
        """
        wanted = None if request_ids is None else set(request_ids)
        found = [
            request
            for name, request in self._requests.items()
            if wanted is None or name in wanted or SERIAL.sub("", name) in wanted
        ]
        for request in found:
            self.abort(request)
        return len(found)

    def fail_all(self, cause: str) -> None:
        """Fail every request, because there are no engines and there will be none."""
        self._router.remove_all(cause)
        num_requests = len(self._requests)
        for request in list(self._requests.values()):
            self._fail(request, EngineFailed(cause))
        self._report_failed(num_requests)

    # Engines.

    def on_engine_joined(self, engine: EngineId, info: EngineInfo) -> None:
        """Send queued requests to an engine that has joined."""
        self._router.add_engine(engine, info)
        num_sent = self._dispatch_queued()
        level = logging.INFO if num_sent else logging.DEBUG  # the supervisor logs once what every client notices
        logger.log(level, "%s has joined; requests sent from the queue: %d", engine.label, num_sent)

    def drain(self, engine: EngineId) -> None:
        """Send no new requests to an engine that is going to leave, while there is another one."""
        self._router.drain(engine)

    def are_on(self, engine: EngineId) -> bool:
        """Whether a request is assigned to the engine."""
        return any(request.engine == engine for request in self._requests.values())

    def on_engine_left(self, engine: EngineId, *, cause: str, will_restart: bool, is_planned: bool = False) -> None:
        """Move, queue or fail the requests of an engine that left, maybe before it had joined.

        `is_planned`: it was told to go, so no request is charged for that.
        """
        message = f"{engine.label} {'left' if is_planned else 'ended'}: {cause}"
        self._router.remove_engine(engine, cause=message, will_restart=will_restart, is_planned=is_planned)
        now = self._clock()
        num_before = len(self._requests)
        self._completions.pop(engine, None)
        for request in [request for request in self._requests.values() if request.engine == engine]:
            request.interrupted_at = now if request.interrupted_at is None else request.interrupted_at
            if request.trace is not None:
                event = "engine_left" if is_planned else "engine_exited"
                request.trace.add_event(event, engine=engine.label, cause=cause)
            if is_planned:
                request.leave_engine()
            elif failure := request.on_engine_exit(message):
                self._fail(request, failure)
        for request in self._queued():
            if not self._router.known_engines.may_serve(request.rank):
                kind = Unavailable if is_planned else EngineFailed
                self._fail(request, kind(message))
        num_failed = num_before - len(self._requests)
        if not is_planned:
            self._report_failed(num_failed)
        num_sent = self._dispatch_queued()
        level = logging.INFO if is_planned else logging.WARNING
        logger.log(
            level if num_before else logging.DEBUG,  # without requests the supervisor's log is enough
            "%s has left%s: %s; requests %s to other engines: %d, queued: %d, failed: %d",
            engine.label,
            " as planned" if is_planned else "",
            cause,
            "moved" if is_planned else "sent",
            num_sent,
            len(self._queued()),
            num_failed,
        )

    def _queued(self) -> list[ClientRequest]:
        """Return the requests that no engine runs."""
        return [request for request in self._requests.values() if request.engine is None]

    def _dispatch_queued(self) -> int:
        """Send the queued requests for which there is an engine, and return their number."""
        sent = [request for request in self._queued() if self._dispatch(request)]
        resumed = [request for request in sent if request.interrupted_at is not None]
        for request in resumed:
            if request.trace is not None and request.engine is not None:
                request.trace.add_event("resumed", engine=request.engine.label)
        if resumed and self.observer is not None:
            self.observer.on_resumed(len(resumed), sum(request.num_known_tokens for request in resumed))
        return len(sent)

    def _dispatch(self, request: ClientRequest) -> bool:
        """Send a request to an engine, and return whether there is one for it now."""
        decision = self._router.choose(
            request.prompt_token_ids,
            cache_salt=request.message.cache_salt,
            adapter=request.message.adapter_number,
            session=request.session,
            rank=request.rank,
        )
        if decision is None:
            return False
        self._send_all(decision.engine, request.next_messages())
        request.engine = decision.engine
        request.prefix_match = self._router.record_sent(decision, len(request.unfinished))
        for completion in request.unfinished.values():
            self._completions[request.engine][completion.engine_request_id] = (request, completion)
        return True

    def _send_all(self, engine: EngineId, messages: Sequence[Generate]) -> None:
        """Send all messages, or leave none with the engine."""
        try:
            for message in messages:
                self._send(engine, message)
        except BaseException:
            # The request does not become in flight, so nothing else would abort the sequences already sent.
            self._send(engine, Abort(self._client, [message.request_id for message in messages]))
            raise

    def _abort_in_engine(self, request: ClientRequest) -> None:
        if request.engine is not None:
            self._send(request.engine, Abort(self._client, request.engine_request_ids))

    # Chunks, and ends of requests.

    def _deliver(self, request: ClientRequest, completion: Completion, chunk: Chunk) -> Iterable[str]:
        """Deliver a chunk. Return the ids of completions that have finished although the engine does not know it."""
        if request.awaits_token:
            self._on_early_chunk(request, chunk)
        if request.is_queued and chunk.token_ids:
            request.first_token_at = time.perf_counter()
            request.first_token_engine = request.engine
            self._leave_queue(request)
            self.on_first_token(request)
        request.deliver(completion, chunk)
        if request.failure is not None:
            others = [other for other in request.engine_request_ids if other != chunk.request_id]
            self._remove(request)
            return others
        if completion.finish_reason is None:
            request.notify_reader(done=False)
            return ()
        # An end that the engine does not know is a stop string or a repetition, which the client looks for.
        unwanted = self._on_finished(request, completion)
        return () if chunk.finish_reason is not None else unwanted

    def _deliver_columns(
        self, completions: Mapping[str, tuple[ClientRequest, Completion]], columns: TokenColumns
    ) -> list[str]:
        """Deliver a token with its details to each of some completions. Returns what `_deliver` does."""
        unwanted: list[str] = []
        for engine_request_id, token_id, logprobs, experts in zip(
            columns.request_ids,
            columns.token_ids,
            columns.logprobs or repeat(None),
            columns.routed_experts or repeat(b""),
            strict=False,  # repeated values have no end
        ):
            if (found := completions.get(engine_request_id)) is not None:
                request, completion = found
                completion.append_detailed(token_id, logprobs, experts)
                if completion.finish_reason is None:
                    request.notify_reader(done=False)
                else:
                    unwanted += self._on_finished(request, completion)
        return unwanted

    def _on_finished(self, request: ClientRequest, completion: Completion) -> Iterable[str]:
        """Remove a completion that has finished, and notify the reader of its output. Return the id that its engine
        knows it under."""
        engine_request_id = completion.engine_request_id
        if len(request.unfinished) > 1:
            assert request.engine is not None
            del request.unfinished[completion.index], self._completions[request.engine][engine_request_id]
            self._record_finished(request, 1)
            request.notify_reader(done=False)
        else:
            self._remove(request)
        return (engine_request_id,)

    def _on_early_chunk(self, request: ClientRequest, chunk: Chunk) -> None:
        """Note the progress of a request whose engine had not sent a token of it before this chunk."""
        has_output = bool(chunk.token_ids) or chunk.pooled is not None
        request.record_started(has_token=has_output)
        if has_output and request.trace is not None:
            request.trace.add_first_output(chunk)
        if request.prefix_match is not None and not chunk.is_started:
            # For prompt log-probabilities or under `skip_reading_prefix_cache`, an engine also computes tokens that are
            # in its cache, so `num_cached_tokens` does not show which blocks the cache has.
            message = request.message
            is_exact = message.sampling.prompt_logprobs is None and not message.skip_reading_prefix_cache
            self._record_started(request, chunk.num_cached_tokens if is_exact else None)
        if has_output and request.interrupted_at is not None:
            if self.observer is not None:
                self.observer.on_next_token(self._clock() - request.interrupted_at)
            request.interrupted_at = None

    def _record_started(self, request: ClientRequest, num_cached_tokens: int | None) -> None:
        if request.engine is not None and request.prefix_match is not None:
            self._router.record_started(request.engine, request.prefix_match, num_cached_tokens)
            request.prefix_match = None

    def _record_finished(self, request: ClientRequest, count: int) -> None:
        """Tell the router that `count` completions have left the engine of the request."""
        self._record_started(request, None)
        if request.engine is not None:
            self._router.record_finished(request.engine, count)

    def _time_out(self, request: ClientRequest) -> None:
        self._abort_in_engine(request)
        message = f"the request was given up after {request.timeout:g} s (`timeout`): {request.progress}"
        self._fail(request, DeadlineExceeded(message))

    def _fail(self, request: ClientRequest, error: EagleRayError) -> None:
        """End a request with an error for its reader."""
        request.failure = error
        self._remove(request)

    def _remove(self, request: ClientRequest) -> None:
        """Forget a request that has finished."""
        if request.timer is not None:
            request.timer.cancel()
        if request.engine is not None:
            for engine_request_id in request.engine_request_ids:
                del self._completions[request.engine][engine_request_id]
            self._record_finished(request, len(request.unfinished))
        del self._requests[request.request_id]
        if request.engine is not None and self._router.is_drained(request.engine):
            self.on_drained(request.engine)
        request.finished_at = time.perf_counter()
        self._leave_queue(request)
        request.notify_reader(done=True)
        if request.trace is not None:
            request.trace.end(request)
        if request.on_end is not None:
            request.on_end(request)

    def _leave_queue(self, request: ClientRequest) -> None:
        if request.is_queued:
            request.is_queued = False
            self.num_queued_seqs -= len(request.completions)

    def _report_failed(self, count: int) -> None:
        if count and self.observer is not None:
            self.observer.on_failed(count)
