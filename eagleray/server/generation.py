"""The prompts of one HTTP request on their way: started together, measured, and ended together.

Owns what happens to the engine's work when the HTTP request ends early, for whatever reason: it is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request

from eagleray.client import CompletionDelta, CompletionOutput, Logprob, Prompt, RequestOutput, RequestStream
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams
from eagleray.metrics import RequestTimer
from eagleray.server.service import Service

__all__ = ["Generation", "Generations", "Order", "all_of"]


T = TypeVar("T")


class Order(NamedTuple):
    """What an HTTP request wants generated."""

    request_id: str
    arrival: float
    """When it came, by `time.perf_counter`."""
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int
    cache_salt: str
    only_prompt: bool = False
    """It takes a token to compute a prompt. That one token was not asked for and is not shown."""

    @classmethod
    def of(
        cls,
        request: Request,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int,
        cache_salt: str | None,
        only_prompt: bool = False,
    ) -> Order:
        state = request.scope["state"]
        return cls(state["request_id"], state["arrival"], prompts, params, priority, cache_salt or "", only_prompt)


class Generation:
    """One prompt on its way. Iterate over what is new of it, or wait for its `result`; not both."""

    def __init__(self, stream: RequestStream, timer: RequestTimer, order: Order) -> None:
        self._stream = stream
        self._timer = timer
        self._wants_prompt_logprobs = order.params.prompt_logprobs is not None
        self._only_prompt = order.only_prompt
        self.prompt_token_ids = stream.prompt_token_ids
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        """Known before the first delta, if they were asked for."""
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[CompletionDelta]:
        """What is new, as soon as there is something. `prompt_logprobs` and the counts are up to date then."""
        news: list[CompletionDelta] = []
        while True:
            delta = await anext(self._stream)
            self.num_cached_tokens = delta.num_cached_tokens
            self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
            for output in delta.outputs:
                self._count(output)
                news.append(output)
            waits = self._wants_prompt_logprobs and self.prompt_logprobs is None and not delta.finished
            if news and not waits:
                return news

    def _count(self, delta: CompletionDelta) -> None:
        self._timer.tokens(delta.index, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._timer.finished(delta.index, delta.finish_reason)
        if self._only_prompt:
            _hide(delta)
        self.num_completion_tokens += len(delta.token_ids)

    async def result(self) -> RequestOutput:
        """All of it, when it is finished."""
        await anext(self._stream)
        self._timer.first_token()
        output = await self._stream.result()
        self.num_cached_tokens = output.num_cached_tokens
        self.prompt_logprobs = output.prompt_logprobs
        for choice in output.outputs:
            self._timer.finished(choice.index, choice.finish_reason or FinishReason.ABORT, len(choice.token_ids))
            if self._only_prompt:
                _hide(choice)
            self.num_completion_tokens += len(choice.token_ids)
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
            for prompt in self._order.prompts:
                self.each.append(self._start(prompt))
        except BaseException:
            self._close(FinishReason.ABORT)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A cancelled request, whose client went away, is not an `Exception`.
        self._close(FinishReason.ERROR if isinstance(error, Exception) else FinishReason.ABORT)

    def _start(self, prompt: Prompt) -> Generation:
        order = self._order
        stream = self._service.client.generate(
            prompt,
            order.params,
            request_id=self._service.unique(order.request_id),
            priority=order.priority,
            cache_salt=order.cache_salt,
        )
        timer = self._service.metrics.requests.begin(
            arrival=order.arrival,
            num_prompt_tokens=len(stream.prompt_token_ids),
            n=order.params.n,
            max_tokens=order.params.max_tokens,
        )
        return Generation(stream, timer, order)

    def _close(self, reason: FinishReason) -> None:
        for generation in self.each:
            generation.close(reason)


def _hide(part: CompletionDelta | CompletionOutput) -> None:
    part.text, part.token_ids = "", []
    if part.logprobs is not None:
        part.logprobs = []


async def all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. They run at the same time; the first exception ends them all and is raised."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
