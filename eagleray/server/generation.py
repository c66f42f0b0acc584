"""The prompts of one HTTP request on their way: started together, measured, and ended together.

Owns what happens to the engine's work when the HTTP request ends early, for whatever reason: it is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from starlette.requests import Request

from eagleray.client import CompletionDelta, Logprob, Prompt, RequestOutput, RequestStream
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams
from eagleray.metrics import RequestTimer
from eagleray.server.service import Service

__all__ = ["Generation", "Generations", "Order", "all_of"]


class Order(NamedTuple):
    """What an HTTP request wants generated."""

    request_id: str
    arrival: float
    """When it came, by `time.perf_counter`."""
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int
    cache_salt: str

    @classmethod
    def of(
        cls,
        request: Request,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int,
        cache_salt: str | None,
    ) -> Order:
        state = request.scope["state"]
        return cls(state["request_id"], state["arrival"], prompts, params, priority, cache_salt or "")


class Generation:
    """One prompt on its way. Read it as a stream of deltas, or call `result`; not both."""

    def __init__(self, stream: RequestStream, timer: RequestTimer, *, wants_prompt_logprobs: bool) -> None:
        self._stream = stream
        self._timer = timer
        self._wants_prompt_logprobs = wants_prompt_logprobs
        self.prompt_token_ids = stream.prompt_token_ids
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        """Known before the first delta, if they were asked for."""
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0

    async def deltas(self) -> AsyncIterator[list[CompletionDelta]]:
        """What is new, as it comes. `prompt_logprobs` and the counts are up to date at each."""
        held: list[CompletionDelta] = []
        async for delta in self._stream:
            self.num_cached_tokens = delta.num_cached_tokens
            self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
            for output in delta.outputs:
                self._timer.tokens(output.index, len(output.token_ids))
                if output.finish_reason is not None:
                    self._timer.finished(output.index, output.finish_reason)
            held += delta.outputs
            if held and (self.prompt_logprobs or delta.finished or not self._wants_prompt_logprobs):
                self.num_completion_tokens += sum(len(output.token_ids) for output in held)
                yield held
                held = []

    async def result(self) -> RequestOutput:
        """All of it, when it is finished."""
        output = await self._stream.result()
        self.num_cached_tokens = output.num_cached_tokens
        self.prompt_logprobs = output.prompt_logprobs
        self.num_completion_tokens = sum(len(choice.token_ids) for choice in output.outputs)
        return output

    def close(self, reason: FinishReason) -> None:
        """Abort what still runs, for this reason. Harmless when it has finished."""
        self._stream.abort()
        self._timer.ended(reason)


class Generations:
    """The generations of one order, in a `with` block: started at its beginning, aborted at its end unless finished."""

    def __init__(self, service: Service, order: Order) -> None:
        self._service = service
        self._order = order
        self.each: list[Generation] = []

    def __enter__(self) -> Generations:
        """Raises `InvalidRequest` or `Unavailable`; nothing is running then."""
        try:
            for index, prompt in enumerate(self._order.prompts):
                self.each.append(self._start(index, prompt))
        except BaseException:
            self._close(FinishReason.ABORT)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A cancelled request, whose client went away, is not an `Exception`.
        self._close(FinishReason.ERROR if isinstance(error, Exception) else FinishReason.ABORT)

    def _start(self, index: int, prompt: Prompt) -> Generation:
        order, client = self._order, self._service.client
        request_id = self._service.unique(order.request_id, index)
        stream = client.generate(
            prompt, order.params, request_id=request_id, priority=order.priority, cache_salt=order.cache_salt
        )
        timer = self._service.metrics.requests.begin(
            arrival=order.arrival,
            num_prompt_tokens=len(stream.prompt_token_ids),
            n=order.params.n,
            max_tokens=order.params.max_tokens,
        )
        return Generation(stream, timer, wants_prompt_logprobs=order.params.prompt_logprobs is not None)

    def _close(self, reason: FinishReason) -> None:
        for generation in self.each:
            generation.close(reason)


async def all_of(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them at the same time. The first exception ends them all and is raised."""
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
