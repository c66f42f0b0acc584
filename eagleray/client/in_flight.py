"""The requests in flight: from the moment they are sent until they end, one way or another.

The client adds, delivers, aborts and fails; this keeps the books, ends what has to end, and wakes the readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from eagleray.client.request_state import RequestState
from eagleray.client.stream import RequestStream
from eagleray.errors import EagleRayError
from eagleray.identity import EngineId
from eagleray.messages.outputs import Chunk

__all__ = ["InFlight", "Request"]


@dataclass(slots=True, eq=False)
class Request:
    """A request in flight."""

    state: RequestState
    engine: EngineId
    running: set[str]
    """The names by which the engine knows its unfinished completions."""
    stream: RequestStream = field(init=False)


class InFlight:
    """`on_abort` is called with a request that its user does not want any more, before it ends here."""

    def __init__(self, on_abort: Callable[[Request], None]) -> None:
        self._on_abort = on_abort
        self._requests: dict[str, Request] = {}
        self._completions: dict[str, tuple[Request, int]] = {}
        """Every running completion with its index, by the name that the engine knows it by."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        """Those there are now; they may end meanwhile."""
        return iter(list(self._requests.values()))

    def load(self) -> Counter[EngineId]:
        """Number of requests of each engine."""
        return Counter(request.engine for request in self._requests.values())

    def add(self, state: RequestState, engine: EngineId, names: list[str]) -> RequestStream:
        """A request whose completions the engine knows by `names`."""
        request = Request(state, engine, set(names))
        request.stream = RequestStream(state, on_abort=lambda: self.abort(request))
        self._requests[state.request_id] = request
        self._completions |= {name: (request, index) for index, name in enumerate(names)}
        return request.stream

    def deliver(self, chunks: Iterable[Chunk]) -> list[str]:
        """What a step brought. Chunks of what has ended here are dropped.

        Returns the names of completions that have ended although their engine does not know it.
        """
        unwanted: list[str] = []
        for chunk in chunks:
            if place := self._completions.get(chunk.request_id):
                unwanted += self._deliver(*place, chunk)
        return unwanted

    def abort(self, request: Request) -> None:
        """End it with what it has."""
        self._on_abort(request)
        request.state.abort()
        self._end(request)

    def fail(self, request: Request, error: EagleRayError) -> None:
        """End it with an error for its reader."""
        request.state.failure = error
        self._end(request)

    def _deliver(self, request: Request, index: int, chunk: Chunk) -> Iterable[str]:
        state, name = request.state, chunk.request_id
        state.deliver(index, chunk)
        if state.failure is not None:
            others = request.running - {name}
            self._end(request)
            return others
        if state.completions[index].finish_reason is None:
            request.stream.wake(ended=False)
            return ()
        request.running.discard(name)
        del self._completions[name]
        if request.running:
            request.stream.wake(ended=False)
        else:
            self._end(request)
        # Without a reason of the engine's it was a stop string, of which the engine knows nothing.
        return (name,) if chunk.finish_reason is None else ()

    def _end(self, request: Request) -> None:
        for name in request.running:
            del self._completions[name]
        request.running.clear()
        del self._requests[request.state.request_id]
        request.stream.wake(ended=True)
