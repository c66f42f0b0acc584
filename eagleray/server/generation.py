"""The prompts of one HTTP request on their way: started together, measured, and ended together.

Owns what happens to the engine's work when the HTTP request ends early, for whatever reason: it is aborted.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol

from starlette.requests import Request

from eagleray.client.outputs import CompletionDelta, CompletionOutput, Logprob, RequestDelta, RequestOutput
from eagleray.client.preprocess import Prompt
from eagleray.client.request import RequestStream
from eagleray.errors import InvalidRequest
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams
from eagleray.metrics.requests import RequestTimer
from eagleray.server.body import field_names
from eagleray.server.headers import rank_of, session_of
from eagleray.server.routed_experts import RoutedExpertsFormat
from eagleray.server.service import Service

START_AT_ONCE = 64
"""Number of prompts that are started before the event loop serves others."""

LARGE_ANSWER_ENTRIES = 2**16
"""Number of tokens and log-probabilities above which the memory of an answer is given back to the system."""

ENTRIES_AT_ONCE = 512
"""Number of tokens and log-probabilities that are sent before the event loop serves others: some milliseconds."""


class GenerationFields(Protocol):
    """The fields of a request's body that say how it is to be treated."""

    priority: int | None
    cache_salt: str | None
    timeout: float | None
    routed_experts_format: RoutedExpertsFormat | None


class GenerationTask(NamedTuple):
    """What an HTTP request wants generated."""

    request_id: str
    arrival: float
    """When it came, by `time.perf_counter`."""
    num_prompts: int
    make_prompts: Callable[[], Awaitable[Sequence[Prompt]]]
    """Tokenizes the prompts. Called when the request has been admitted."""
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

    @property
    def has_logprobs(self) -> bool:
        """Whether it asks for log-probabilities of the tokens that are generated."""
        return self.params.logprobs is not None or bool(self.params.logprob_token_ids)

    @classmethod
    def of(
        cls,
        service: Service,
        request: Request,
        fields: GenerationFields,
        *,
        num_prompts: int = 1,
        make_prompts: Callable[[], Awaitable[Sequence[Prompt]]],
        params: SamplingParams,
        only_prompt: bool = False,
        field_names: Mapping[str, str] = {},
    ) -> GenerationTask:
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


@dataclass
class TokenTotals:
    """Tokens of all prompts of an HTTP request together."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    """Tokens of all completions so far, without the one that a request for its prompt alone computes."""
    num_cached_tokens: int = 0


class Generation:
    """One prompt on its way. Take what is new of it, or wait for its `result`; not both."""

    def __init__(self, stream: RequestStream, timer: RequestTimer, order: GenerationTask, totals: TokenTotals) -> None:
        self._stream = stream
        self._timer = timer
        self._only_prompt = order.only_prompt
        self._wants_prompt_logprobs = order.params.prompt_logprobs is not None
        self._has_logprobs = order.has_logprobs
        self._num_tokens = [0] * order.params.n
        self._totals = totals
        self._held: list[CompletionDelta] = []
        """Tokens that came before the log-probabilities of the prompt were complete."""
        self.prompt_token_ids = stream.prompt_token_ids
        self.prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
        """Known before anything else is told, if they were asked for."""
        self._num_cached_tokens = 0
        totals.num_prompt_tokens += len(self.prompt_token_ids)

    def on_news(self, callback: Callable[[], None]) -> None:
        """Register `callback`, which is called whenever `take` may have something."""
        self._stream.set_on_output(callback)

    @property
    def has_more(self) -> bool:
        """Whether `take` has left something, since it returns a few milliseconds' work at most."""
        return self._stream.has_more

    def take(self) -> tuple[list[CompletionDelta], bool]:
        """Return what is new now, and whether it is the last of it. Raises what ended the request."""
        delta = self._stream.pop_delta()
        if delta is None:
            return [], False
        self._note_prompt(delta)
        for output in delta.outputs:
            self._timer.tokens(output.index, len(output.token_ids))
            self._count(output)
        self._held += delta.outputs
        if self._wants_prompt_logprobs and self.prompt_logprobs is None and not delta.finished:
            return [], False
        news, self._held = self._held, []
        return news, delta.finished

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have come, whether they were read or not."""
        return self._stream.num_tokens

    async def wait_until_ended(self) -> None:
        """Raises what ended the request early."""
        await self._stream.wait_until_ended()

    async def result(self, collect: Callable[[CompletionDelta], Awaitable[None]]) -> RequestOutput:
        """All of it, when it has ended. Log-probabilities are not in it: they are given to `collect` in parts."""
        await self._stream.wait_until_ended()
        if self._stream.first_token_at is not None:
            self._timer.first_token(self._stream.first_token_at)
        if self._has_logprobs or self._wants_prompt_logprobs:
            async for delta in self._stream:
                self._note_prompt(delta)
                for part in delta.outputs:
                    if self._only_prompt:
                        _hide(part)
                    await collect(part)
        output = await self._stream.result(with_logprobs=False)
        self._note_cached(output.num_cached_tokens)
        for choice in output.outputs:
            self._count(choice)
        return output

    async def close(self, reason: FinishReason) -> None:
        """Abort what still runs, for this reason. Harmless when it has ended."""
        self._stream.abort()
        self._timer.ended(reason)

    def _note_prompt(self, delta: RequestDelta) -> None:
        self._note_cached(delta.num_cached_tokens)
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs

    def _note_cached(self, num_tokens: int) -> None:
        self._totals.num_cached_tokens += num_tokens - self._num_cached_tokens
        self._num_cached_tokens = num_tokens

    def _count(self, part: CompletionDelta | CompletionOutput) -> None:
        num_tokens = len(part.token_ids)
        self._num_tokens[part.index] += num_tokens
        self._totals.num_completion_tokens += 0 if self._only_prompt else num_tokens
        if part.finish_reason is not None:
            self._timer.finished(part.index, part.finish_reason, self._num_tokens[part.index])
        if self._only_prompt:
            _hide(part)


class GenerationGroup:
    """The generations of one order, for an `async with` block: what still runs at its end is aborted."""

    def __init__(self, service: Service, order: GenerationTask) -> None:
        self._service = service
        self._order = order
        num_logprobs = (order.params.logprobs or 0) + len(order.params.logprob_token_ids or ())
        self._entries_per_token = 1 + num_logprobs
        self.prompts: Sequence[Prompt] = []
        self.each: list[Generation] = []
        """One for each of the prompts."""
        self.totals = TokenTotals()

    async def __aenter__(self) -> GenerationGroup:
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

    async def news(self) -> AsyncIterator[tuple[int, list[CompletionDelta]]]:
        """Yield what is new of each prompt, with the prompt's place, until all have ended.

        The event loop serves others after every few milliseconds of work.
        """
        ready: dict[int, None] = dict.fromkeys(range(len(self.each)))
        has_news = asyncio.Event()
        for place, generation in enumerate(self.each):
            generation.on_news(functools.partial(_put, ready, place, has_news))
        running, num_entries = set(ready), 0
        while running:
            while not ready:
                has_news.clear()
                num_entries = 0
                await has_news.wait()
            place = next(iter(ready))
            del ready[place]
            if place not in running:
                continue
            generation = self.each[place]
            news, is_last = generation.take()
            if is_last:
                running.discard(place)
            elif generation.has_more:
                ready[place] = None
            if news:
                yield place, news
            num_entries += sum(len(part.token_ids) for part in news) * self._entries_per_token
            if num_entries > ENTRIES_AT_ONCE:
                num_entries = 0
                await asyncio.sleep(0)

    async def wait_until_ended(self) -> None:
        """Wait for all. The first that fails ends the others, and its error is raised."""
        if len(self.each) == 1:
            await self.each[0].wait_until_ended()
            return
        try:
            async with asyncio.TaskGroup() as group:
                for generation in self.each:
                    group.create_task(generation.wait_until_ended())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

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
            return Generation(stream, timer, order, self.totals)
        except BaseException:
            stream.abort()  # nobody else knows of it yet
            raise

    async def _close(self, reason: FinishReason) -> None:
        for generation in self.each:
            await generation.close(reason)
        if sum(generation.num_tokens for generation in self.each) * self._entries_per_token > LARGE_ANSWER_ENTRIES:
            self._service.memory_return.schedule()


def _hide(part: CompletionDelta | CompletionOutput) -> None:
    part.text, part.token_ids = "", []
    if part.logprobs is not None:
        part.logprobs = []
    if part.finish_reason is FinishReason.STOP:
        part.finish_reason, part.stop_reason = FinishReason.LENGTH, None


def _put(ready: dict[int, None], place: int, has_news: asyncio.Event) -> None:
    ready[place] = None
    has_news.set()
