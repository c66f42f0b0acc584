"""The prompts of one HTTP request on their way: started together, measured, and ended together.

Owns what happens to the engine's work when the HTTP request ends early, for whatever reason: it is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.requests import Request

from eagleray.client import CompletionDelta, CompletionOutput, Logprob, Prompt, RequestOutput, RequestStream
from eagleray.errors import InvalidRequest
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams
from eagleray.metrics import RequestTimer
from eagleray.server.body import field_names
from eagleray.server.headers import rank_of, session_of
from eagleray.server.routed_experts import RoutedExpertsFormat
from eagleray.server.service import Service

__all__ = ["Generation", "Generations", "Order", "OrderFields", "all_of"]


T = TypeVar("T")

START_AT_ONCE = 64
"""After this many prompts of one order, the event loop's others get their turn."""


class OrderFields(Protocol):
    """The fields of a request's body that say how it is to be treated."""

    priority: int | None
    cache_salt: str | None
    timeout: float | None
    routed_experts_format: RoutedExpertsFormat | None


class Order(NamedTuple):
    """What an HTTP request wants generated."""

    request_id: str
    arrival: float
    """When it came, by `time.perf_counter`."""
    num_prompts: int
    make_prompts: Callable[[], Awaitable[Sequence[Prompt]]]
    """Tokenizes them. Called when the request has been admitted."""
    params: SamplingParams
    priority: int
    cache_salt: str
    timeout: float | None
    """Seconds; None: as the client is set up."""
    rank: int | None
    """Of the engine that it must go to; None: any."""
    session: str | None
    """It goes to the engine that others of its session went to."""
    only_prompt: bool
    """It takes a token to compute a prompt. That one token was not asked for and is not shown."""
    field_names: Mapping[str, str]
    """What the request calls the fields that the client knows as `prompt`, `logprobs` and so on, where it differs."""

    @classmethod
    def of(
        cls,
        service: Service,
        request: Request,
        fields: OrderFields,
        *,
        num_prompts: int = 1,
        make_prompts: Callable[[], Awaitable[Sequence[Prompt]]],
        params: SamplingParams,
        only_prompt: bool = False,
        field_names: Mapping[str, str] = {},
    ) -> Order:
        """Raises `InvalidRequest` for a wrong header, and for a priority or a format that could have no effect."""
        if fields.routed_experts_format is not None and not params.return_routed_experts:
            raise InvalidRequest(
                "`routed_experts_format` is for requests that ask for routed experts: add `return_routed_experts`, or "
                "drop it",
                param="routed_experts_format",
            )
        state = request.scope["state"]
        return cls(
            request_id=state["request_id"],
            arrival=state["arrival"],
            num_prompts=num_prompts,
            make_prompts=make_prompts,
            params=params,
            priority=service.check_priority(fields.priority),
            cache_salt=fields.cache_salt or "",
            timeout=fields.timeout,
            rank=rank_of(request.headers, service.ranks),
            session=session_of(request.headers),
            only_prompt=only_prompt,
            field_names=field_names,
        )


class Generation:
    """One prompt on its way. Iterate over what is new of it, or wait for its `result`; not both."""

    def __init__(self, stream: RequestStream, timer: RequestTimer, order: Order) -> None:
        self._stream = stream
        self._deltas = aiter(stream)
        self._timer = timer
        self._only_prompt = order.only_prompt
        self._wants_prompt_logprobs = order.params.prompt_logprobs is not None
        self._num_tokens = [0] * order.params.n
        self.prompt_token_ids = stream.prompt_token_ids
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        """Known before anything else is told, if they were asked for."""
        self.num_cached_tokens = 0

    @property
    def num_completion_tokens(self) -> int:
        """That were asked for, in all completions so far."""
        return 0 if self._only_prompt else sum(self._num_tokens)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[CompletionDelta]:
        """What is new, as soon as there is something."""
        news: list[CompletionDelta] = []
        while True:
            delta = await anext(self._deltas)
            self.num_cached_tokens = delta.num_cached_tokens
            self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
            for output in delta.outputs:
                self._timer.tokens(output.index, len(output.token_ids))
                self._count(output)
            news += delta.outputs
            waits = self._wants_prompt_logprobs and self.prompt_logprobs is None and not delta.finished
            if news and not waits:
                return news

    async def result(self) -> RequestOutput:
        """All of it, when it has ended."""
        # Deltas, to learn when the first token came; the rest is cheaper in one piece.
        async for delta in self._deltas:
            if any(output.token_ids for output in delta.outputs):
                self._timer.first_token()
                break
        output = await self._stream.result()
        self.num_cached_tokens = output.num_cached_tokens
        self.prompt_logprobs = output.prompt_logprobs
        for choice in output.outputs:
            self._count(choice)
        return output

    async def close(self, reason: FinishReason) -> None:
        """Abort what still runs, for this reason. Harmless when it has ended."""
        self._stream.abort()
        await self._deltas.aclose()
        self._timer.ended(reason)

    def _count(self, part: CompletionDelta | CompletionOutput) -> None:
        self._num_tokens[part.index] += len(part.token_ids)
        if part.finish_reason is not None:
            self._timer.finished(part.index, part.finish_reason, self._num_tokens[part.index])
        if self._only_prompt:
            _hide(part)


class Generations:
    """The generations of one order, for an `async with` block: what still runs at its end is aborted."""

    def __init__(self, service: Service, order: Order) -> None:
        self._service = service
        self._order = order
        self.prompts: Sequence[Prompt] = []
        self.each: list[Generation] = []
        """One for each of the prompts."""

    async def __aenter__(self) -> Generations:
        """Raises `InvalidRequest` or `Unavailable` (or `Overloaded`); nothing is running then."""
        order = self._order
        with field_names(order.field_names):
            reservation = self._service.admission.reserve(order.num_prompts, order.params.n)
        try:
            self.prompts = await self._make_prompts()
            for prompt in self.prompts:
                self.each.append(self._start(prompt))
                reservation.use(order.params.n)
                if len(self.each) % START_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except BaseException:
            await self._close(FinishReason.ABORT)
            raise
        finally:
            reservation.release()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The cancellation of a request whose client went away is not an `Exception`.
        await self._close(FinishReason.ERROR if isinstance(error, Exception) else FinishReason.ABORT)

    async def _make_prompts(self) -> Sequence[Prompt]:
        order = self._order
        with field_names(order.field_names):
            prompts = await order.make_prompts()
            token_ids = [prompt.token_ids or [] for prompt in prompts]
            self._service.admission.check_size(token_ids, order.params, self._service.max_model_len)
        return prompts

    def _start(self, prompt: Prompt) -> Generation:
        order = self._order
        with field_names(order.field_names):
            stream = self._service.client.generate(
                prompt,
                order.params,
                request_id=self._service.unique(order.request_id),
                priority=order.priority,
                cache_salt=order.cache_salt,
                timeout=order.timeout,
                session=order.session,
                rank=order.rank,
            )
        try:
            timer = self._service.metrics.requests.begin(
                arrival=order.arrival,
                num_prompt_tokens=len(stream.prompt_token_ids),
                n=order.params.n,
                max_tokens=order.params.max_tokens,
            )
            return Generation(stream, timer, order)
        except BaseException:
            stream.abort()  # nobody else knows of it yet
            raise

    async def _close(self, reason: FinishReason) -> None:
        for generation in self.each:
            await generation.close(reason)


def _hide(part: CompletionDelta | CompletionOutput) -> None:
    part.text, part.token_ids = "", []
    if part.logprobs is not None:
        part.logprobs = []
    if part.finish_reason is FinishReason.STOP:
        part.finish_reason, part.stop_reason = FinishReason.LENGTH, None


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
