"""The requests in flight: from the moment they are taken in until they end, one way or another.

The dispatch sends and resumes them; this keeps the books, delivers, ends what has to end, and wakes the readers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from eagleray.client.journal import ResumePoint
from eagleray.client.recovery import RestartBudget
from eagleray.client.request_state import RequestState
from eagleray.client.routing.router import SentRequest
from eagleray.client.stream import RequestStream
from eagleray.errors import EagleRayError
from eagleray.identity import EngineId
from eagleray.messages.outputs import Chunk
from eagleray.messages.requests import Generate


@dataclass(slots=True, eq=False, kw_only=True)
class ClientRequest:
    """A request in flight."""

    state: RequestState
    running: dict[int, ResumePoint]
    """Its unfinished completions, by index."""
    deaths: RestartBudget
    timeout: float | None = None
    """Seconds from its arrival to its failure."""
    session: str | None = None
    rank: int | None = None
    """The only engine that it may go to."""
    engine: EngineId | None = None
    """With which it is; None while it waits for one."""
    sending: SentRequest | None = None
    """Until that engine has said the first of it."""
    is_queued: bool = True
    """No token of it has come yet, from any engine."""
    is_fresh: bool = False
    """That engine has not brought a token yet."""
    lost_at: float | None = None
    """When an engine of it was lost, until it has a token again."""
    timer: asyncio.TimerHandle | None = None
    stream: RequestStream = field(init=False)

    @property
    def message(self) -> Generate:
        """Of its first unfinished completion, as it was sent first."""
        return next(iter(self.running.values())).message

    @property
    def names(self) -> list[str]:
        """By which its engine knows its unfinished completions."""
        return [entry.name for entry in self.running.values()]

    @property
    def num_tokens(self) -> int:
        """What an engine has to compute before it can go on: of the prompt and of what is there already."""
        tokens = [self.state.completions[index].token_ids for index in self.running]
        return len(self.state.prompt_token_ids) * len(tokens) + sum(map(len, tokens))

    @property
    def progress(self) -> str:
        """How far it is, for people."""
        num_tokens = sum(len(completion.token_ids) for completion in self.state.completions)
        limit = self.message.stopping.max_tokens * len(self.state.completions)
        waits = "" if self.engine else ", and it was waiting for an engine to come back"
        return f"it had {num_tokens} of at most {limit} tokens{waits}"

    def next_messages(self) -> list[Generate]:
        """What makes an engine go on with it."""
        self.deaths.was_sent()
        return [
            entry.next_message(
                token_ids=self.state.completions[index].token_ids,
                prompt_logprobs_from=self.state.prompt_logprobs_from if index == 0 else 1,
                routed_experts_from=self.state.completions[index].routed_experts_from,
                is_suspect=self.deaths.is_suspect,
                announce_start=self.deaths.asks_for_start,
            )
            for index, entry in self.running.items()
        ]


class Keeper(Protocol):
    """Who must know what happens to requests."""

    def on_abort(self, request: ClientRequest) -> None:
        """Its user does not want it any more. Called before it ends here."""

    def on_fresh(self, request: ClientRequest, chunk: Chunk) -> None:
        """A chunk of a request that was fresh until now. Called before it is delivered."""

    def on_ended(self, request: ClientRequest, count: int) -> None:
        """So many of its completions are no longer with its engine."""


class InFlightRequests:
    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._requests: dict[str, ClientRequest] = {}
        self._completions: dict[str, tuple[ClientRequest, int]] = {}
        """Every completion that is with an engine, with its index, by the name that the engine knows it by."""
        self.num_queued_seqs = 0
        """Completions of the requests that are queued."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[ClientRequest]:
        """Those there are now, in order of arrival; they may end meanwhile."""
        return iter(list(self._requests.values()))

    @property
    def waiting(self) -> list[ClientRequest]:
        """Those that are with no engine."""
        return [request for request in self._requests.values() if request.engine is None]

    def add(self, request: ClientRequest) -> RequestStream:
        request.stream = RequestStream(request.state, on_abort=lambda: self.abort(request))
        self._requests[request.state.request_id] = request
        self.num_queued_seqs += len(request.state.completions)
        return request.stream

    def assign(self, request: ClientRequest, sending: SentRequest) -> None:
        """It was sent to an engine."""
        request.engine, request.sending, request.is_fresh = sending.engine, sending, True
        self._completions |= {entry.name: (request, index) for index, entry in request.running.items()}

    def detach(self, engine: EngineId) -> list[ClientRequest]:
        """The engine is gone. Those that were with it are with none now."""
        lost = [request for request in self._requests.values() if request.engine == engine]
        for request in lost:
            for name in request.names:
                del self._completions[name]
            request.engine = request.sending = None
            request.state.resume()
        return lost

    def deliver(self, engine: EngineId, chunks: Sequence[Chunk]) -> list[str]:
        """What a step of the engine brought. Chunks of what has ended here, or has gone elsewhere, are dropped.

        Returns the names of completions that have ended although the engine does not know it.
        """
        unwanted: list[str] = []
        for chunk in chunks:
            place = self._completions.get(chunk.request_id)
            if place is not None and place[0].engine == engine:
                unwanted += self._deliver(*place, chunk)
        return unwanted

    def abort(self, request: ClientRequest) -> None:
        """End it with what it has."""
        self._keeper.on_abort(request)
        request.state.abort()
        self._end(request)

    def fail(self, request: ClientRequest, error: EagleRayError) -> None:
        """End it with an error for its reader."""
        request.state.failure = error
        self._end(request)

    def _deliver(self, request: ClientRequest, index: int, chunk: Chunk) -> Iterable[str]:
        state, name = request.state, chunk.request_id
        if request.is_fresh:
            self._keeper.on_fresh(request, chunk)
        if request.is_queued and chunk.token_ids:
            request.stream.first_token_at = time.perf_counter()
            self._leave_queue(request)
        state.deliver(index, chunk)
        if state.failure is not None:
            others = [other for other in request.names if other != name]
            self._end(request)
            return others
        if state.completions[index].finish_reason is None:
            request.stream.wake(ended=False)
            return ()
        if len(request.running) > 1:
            del request.running[index], self._completions[name]
            self._keeper.on_ended(request, 1)
            request.stream.wake(ended=False)
        else:
            self._end(request)
        # Without a reason of the engine's it was a stop string, of which the engine knows nothing.
        return (name,) if chunk.finish_reason is None else ()

    def _end(self, request: ClientRequest) -> None:
        if request.timer is not None:
            request.timer.cancel()
        if request.engine is not None:
            for name in request.names:
                del self._completions[name]
            self._keeper.on_ended(request, len(request.running))
        del self._requests[request.state.request_id]
        self._leave_queue(request)
        request.stream.wake(ended=True)

    def _leave_queue(self, request: ClientRequest) -> None:
        if request.is_queued:
            request.is_queued = False
            self.num_queued_seqs -= len(request.state.completions)
