"""What a user holds of a request: read it piece by piece, or wait for its end; abort it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from eagleray.client.outputs import RequestDelta, RequestOutput
from eagleray.client.request_state import RequestState

TOKENS_AT_ONCE = 4096
"""Number of tokens that are made into text before the event loop serves others."""


class RequestStream:
    """A request on its way. What becomes of engines meanwhile does not show here.

    Either `async for delta in stream`, or `await stream.result()`. When the iteration is left early or the task that
    waits is cancelled, the request is aborted; `async with stream` makes sure of it whatever happens in the block.

    Both raise `RequestFailed` if this request failed, `DeadlineExceeded` if its time is over, and `EngineFailed` if it
    lost more engines than it may, or the last one that there was.
    """

    def __init__(self, state: RequestState, on_abort: Callable[[], None]) -> None:
        self.first_token_at: float | None = None
        """When the first token of any completion came, by `time.perf_counter`."""
        self.on_news: Callable[[], None] | None = None
        """Called when there is something new, for those who read with `take`."""
        self._state = state
        self._on_abort = on_abort
        self._news = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._state.prompt_token_ids

    async def __aiter__(self) -> AsyncGenerator[RequestDelta, None]:
        """What is new, as soon as something is. The last delta is `finished`."""
        try:
            while True:
                self._news.clear()
                if delta := self.take():
                    yield delta
                    if delta.finished:
                        return
                    if self.has_more:
                        await asyncio.sleep(0)
                elif self._state.is_finished:  # somebody has read it before
                    return
                else:
                    await self._news.wait()
        finally:
            self.abort()

    def take(self) -> RequestDelta | None:
        """Return what is new now, as much as fits into one delta, or None. Raises as the iteration does."""
        delta = self._state.take()
        if delta is None and self._state.failure is not None:
            raise self._state.failure
        return delta

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions that have come so far."""
        return sum(len(completion.token_ids) for completion in self._state.completions)

    @property
    def has_more(self) -> bool:
        """Whether the last delta did not hold all: yield to the event loop before you take the next one."""
        return self._state.has_more

    async def wait_until_ended(self) -> None:
        """Wait for the end. Raises as the iteration does."""
        try:
            await self._ended.wait()
        finally:
            self.abort()
        if self._state.failure is not None:
            raise self._state.failure

    async def result(self, *, with_logprobs: bool = True) -> RequestOutput:
        """The whole request, when it has ended. Cheaper than the deltas: nothing is done before the end.

        `with_logprobs` False leaves log-probabilities out: they were read as deltas.
        """
        await self.wait_until_ended()
        num_tokens = 0
        for completion in self._state.completions:
            completion.detokenize(len(completion.token_ids))
            num_tokens += len(completion.token_ids)
            if num_tokens > TOKENS_AT_ONCE:
                num_tokens = 0
                await asyncio.sleep(0)
        return self._state.output(with_logprobs=with_logprobs)

    def abort(self) -> None:
        """End it now, with finish reason `abort`; what came so far stays readable. Harmless after the end."""
        if not self._ended.is_set():
            self._on_abort()

    async def aclose(self) -> None:
        self.abort()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.abort()

    def wake(self, *, ended: bool) -> None:
        """For the client: there is something new, and perhaps it is the last."""
        self._news.set()
        if self.on_news is not None:
            self.on_news()
        if ended:
            self._ended.set()
