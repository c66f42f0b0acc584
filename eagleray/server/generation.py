"""The prompts of one HTTP request: sent together, measured, read as their tokens come, and aborted together.

Owns the rule that an HTTP request which ends early, for whatever reason, leaves no work to the engines. Driven by
`generation_route`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from eagleray.client.outputs import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    RequestDelta,
    RequestOutput,
    WeightVersionSpan,
)
from eagleray.client.preprocess import Prompt, RequestOptions
from eagleray.client.request import RequestStream
from eagleray.identity import FIRST_WEIGHT_VERSION
from eagleray.messages.arrays import Array
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams
from eagleray.metrics.requests import RequestTimer
from eagleray.server.body import field_names
from eagleray.server.service import Service

PROMPTS_AT_ONCE = 64
"""Number of prompts that are sent before the event loop serves others."""

LARGE_ANSWER_ENTRIES = 2**16
"""Number of tokens and log-probabilities above which the memory of an answer is given back to the system."""

ENTRIES_AT_ONCE = 512
"""Number of tokens and log-probabilities that are read before the event loop serves others: some milliseconds."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Prompt tokens that did not have to be computed, because the prefix cache had them."""


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    """Tokens that the text of the reasoning has."""


# The tokens of all prompts of an HTTP request together, counted while they come, and a part of its answer.
class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    """Tokens of all completions so far, without the one that a request for its prompt alone computes."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    """None without the option `enable_prompt_tokens_details`."""
    completion_tokens_details: CompletionTokensDetails | None = None
    """None unless reasoning is divided from the answers, and before they have ended."""


WeightVersionsField = (
    Annotated[
        list[WeightVersionSpan],
        Meta(description="Versions of the weights that made the tokens of the completion, from `start` to `end` - 1."),
    ]
    | UnsetType
)
"""Type of a choice's field; in a stream, only the last event of a choice has it."""


class GenerationTask(NamedTuple):
    """The tokens that an HTTP request asks for, and how its prompts are to be sent."""

    request_id: str
    arrival: float
    """Time at which the HTTP request came, by `time.perf_counter`."""
    num_prompts: int
    params: SamplingParams
    options: RequestOptions
    """Options of the client's requests, without their ids."""
    only_prompt: bool
    """Whether the request asks for no token. Computing a prompt yields one, which is neither shown nor counted."""
    field_names: Mapping[str, str]
    """This API's names of the fields that the client calls `prompt`, `logprobs` and so on, where they differ."""

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities of the generated tokens are asked for."""
        return self.params.logprobs is not None or bool(self.params.logprob_token_ids)


class Generation:
    """A prompt that was sent to the client. Read its deltas as they come, or wait for its `result`; not both."""

    def __init__(
        self,
        stream: RequestStream,
        timer: RequestTimer,
        task: GenerationTask,
        usage: Usage,
        details: PromptTokensDetails,
        prompt: Prompt,
        index: int,
    ) -> None:
        self.prompt = prompt
        self.prompt_token_ids = stream.prompt_token_ids
        self.prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
        """Log-probabilities of the prompt's tokens, if asked for: complete before the first delta is read."""
        self.prompt_scores: Array | None = None
        """Scores of the ids that were given for positions of the prompt, once there is a whole `result`."""
        self.index = index
        """Number of the prompt in its request."""
        self.text_offsets: dict[int, int] = {}
        """Length of the text shown so far of each completion, as the texts of its tokens add up. Belongs to the route,
        which enters a completion when it shows the first of it."""
        self._stream = stream
        self._timer = timer
        self._only_prompt = task.only_prompt
        self._field_names = task.field_names
        self._wants_prompt_logprobs = task.params.prompt_logprobs is not None
        self._has_logprobs = task.has_logprobs
        self._num_tokens = [0] * task.params.n
        self._usage = usage
        self._details = details
        self._num_cached_tokens = 0
        self._held: list[CompletionDelta] = []
        """Deltas that came before the log-probabilities of the prompt were complete."""
        num_prompt_tokens = len(self.prompt_token_ids)
        usage.prompt_tokens += num_prompt_tokens
        usage.total_tokens += num_prompt_tokens

    def set_on_delta(self, callback: Callable[[], None]) -> None:
        """Set the `callback` that is called whenever `pop_deltas` may have something."""
        self._stream.set_on_output(callback)

    @property
    def has_more(self) -> bool:
        """Whether `pop_deltas` has left something, since it returns a few milliseconds' work at most."""
        return self._stream.has_more

    def pop_deltas(self) -> tuple[list[CompletionDelta], bool]:
        """Return the deltas since the last call, and whether they are the last. Raises why the request failed."""
        with field_names(self._field_names):
            delta = self._stream.pop_delta()
        if delta is None:
            return [], False
        self._record_prompt(delta)
        for output in delta.outputs:
            self._timer.tokens(output.index, len(output.token_ids), self._stream.first_token_engine)
            self._count(output)
        if self._wants_prompt_logprobs:
            self._held += delta.outputs
            if self.prompt_logprobs is None and not delta.finished:
                return [], False
            deltas, self._held = self._held, []
            return deltas, delta.finished
        return delta.outputs, delta.finished

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have come, whether they were read or not."""
        return self._stream.num_tokens

    async def wait_until_ended(self) -> None:
        """Wait for the last token. Raises the error of a failed request."""
        with field_names(self._field_names):
            await self._stream.wait_until_finished()

    async def result(self, collect: Callable[[CompletionDelta], Awaitable[None]]) -> RequestOutput:
        """Return the whole output when it is complete, without log-probabilities: `collect` gets them in parts."""
        await self._stream.wait_until_finished()
        if self._stream.first_token_at is not None:
            self._timer.first_token(self._stream.first_token_at, self._stream.first_token_engine)
        if self._has_logprobs or self._wants_prompt_logprobs:
            async for delta in self._stream:
                self._record_prompt(delta)
                for part in delta.outputs:
                    if self._only_prompt:
                        _hide(part)
                    await collect(part)
        output = await self._stream.result(with_logprobs=False)
        self._record_cached(output.num_cached_tokens)
        self.prompt_scores = output.prompt_token_id_logprobs
        for choice in output.outputs:
            self._count(choice)
        return output

    async def output(self) -> RequestOutput:
        """Return the whole output, without log-probabilities, after all deltas have been read."""
        return await self._stream.result(with_logprobs=False)

    def close(self, reason: FinishReason) -> None:
        """Abort the completions that still run, and record `reason` as theirs. Harmless when all have ended."""
        self._stream.abort()
        self._timer.ended(reason)

    def _record_prompt(self, delta: RequestDelta) -> None:
        self._record_cached(delta.num_cached_tokens)
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs

    def _record_cached(self, num_tokens: int) -> None:
        self._details.cached_tokens += num_tokens - self._num_cached_tokens
        self._num_cached_tokens = num_tokens

    def _count(self, part: CompletionDelta | CompletionOutput) -> None:
        num_tokens = len(part.token_ids)
        self._num_tokens[part.index] += num_tokens
        if not self._only_prompt:
            self._usage.completion_tokens += num_tokens
            self._usage.total_tokens += num_tokens
        if part.finish_reason is not None:
            self._timer.finished(part.index, part.finish_reason, self._num_tokens[part.index])
        if self._only_prompt:
            _hide(part)


class GenerationGroup:
    """The generations of one task in an `async with` block, at the end of which unfinished ones are aborted.

    `make_prompts` tokenizes the prompts. It is called when the request has been admitted.
    """

    def __init__(
        self, service: Service, task: GenerationTask, make_prompts: Callable[[], Awaitable[Sequence[Prompt]]]
    ) -> None:
        self._service = service
        self._task = task
        self._make_prompts = make_prompts
        num_logprobs = (task.params.logprobs or 0) + len(task.params.logprob_token_ids or ())
        self._entries_per_token = 1 + num_logprobs
        self.generations: list[Generation] = []
        """The generations in order of the prompts."""
        self.prompt_details = PromptTokensDetails(0)
        self.usage = Usage(0, 0, 0, self.prompt_details if service.shows_prompt_details else None)

    async def __aenter__(self) -> GenerationGroup:
        """Admit, tokenize and send the prompts.

        Raises `InvalidRequest` or `Unavailable` (or `Overloaded`); nothing is running then.
        """
        task = self._task
        with field_names(task.field_names):
            reservation = self._service.admission.reserve(task.num_prompts, task.params.n)
            try:
                for index, prompt in enumerate(await self._tokenize()):
                    self.generations.append(self._send(index, prompt))
                    reservation.use(task.params.n)
                    if (index + 1) % PROMPTS_AT_ONCE == 0:
                        await asyncio.sleep(0)
            except BaseException:
                self._close(FinishReason.ABORT)
                raise
            finally:
                reservation.release()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The cancellation of a request whose client has disconnected is not an `Exception`.
        self._close(FinishReason.ERROR if isinstance(error, Exception) else FinishReason.ABORT)

    async def deltas(self) -> AsyncIterator[tuple[Generation, list[CompletionDelta]]]:
        """Yield the deltas of each prompt as they come, until all prompts have ended.

        The event loop serves others after every few milliseconds of work.
        """
        ready: dict[int, None] = dict.fromkeys(range(len(self.generations)))
        has_ready = asyncio.Event()
        for generation in self.generations:
            generation.set_on_delta(functools.partial(_mark_ready, ready, generation.index, has_ready))
        running, num_entries = set(ready), 0
        while running:
            while not ready:
                has_ready.clear()
                num_entries = 0
                await has_ready.wait()
            index = next(iter(ready))
            del ready[index]
            if index not in running:
                continue
            generation = self.generations[index]
            deltas, is_last = generation.pop_deltas()
            if is_last:
                running.discard(index)
            elif generation.has_more:
                ready[index] = None
            if deltas:
                yield generation, deltas
            num_entries += sum(len(delta.token_ids) for delta in deltas) * self._entries_per_token
            if num_entries > ENTRIES_AT_ONCE:
                num_entries = 0
                await asyncio.sleep(0)

    async def wait_until_ended(self) -> None:
        """Wait until all prompts have ended. The first that fails ends the others, and its error is raised."""
        if len(self.generations) == 1:
            await self.generations[0].wait_until_ended()
            return
        try:
            async with asyncio.TaskGroup() as group:
                for generation in self.generations:
                    group.create_task(generation.wait_until_ended())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _tokenize(self) -> Sequence[Prompt]:
        prompts = await self._make_prompts()
        token_ids = [prompt.token_ids or [] for prompt in prompts]
        self._service.admission.check_size(token_ids, self._task.params, self._service.max_model_len)
        return prompts

    def _send(self, index: int, prompt: Prompt) -> Generation:
        task = self._task
        options: RequestOptions = {**task.options, "request_id": self._service.unique(task.request_id)}
        stream = self._service.client.generate(prompt, task.params, **options)
        try:
            timer = self._service.metrics.requests.begin(
                arrival=task.arrival,
                num_prompt_tokens=len(stream.prompt_token_ids),
                n=task.params.n,
                max_tokens=task.params.max_tokens,
            )
            return Generation(stream, timer, task, self.usage, self.prompt_details, prompt, index)
        except BaseException:
            stream.abort()  # the group does not have it yet, and would not abort it
            raise

    def _close(self, reason: FinishReason) -> None:
        for generation in self.generations:
            generation.close(reason)
        num_tokens = sum(generation.num_tokens for generation in self.generations)
        if num_tokens * self._entries_per_token > LARGE_ANSWER_ENTRIES:
            self._service.memory_return.schedule()


def _hide(part: CompletionDelta | CompletionOutput) -> None:
    part.text, part.token_ids = "", []
    if part.logprobs is not None:
        part.logprobs = []
    if part.finish_reason is FinishReason.STOP:
        part.finish_reason, part.stop_reason = FinishReason.LENGTH, None


def _mark_ready(ready: dict[int, None], index: int, has_ready: asyncio.Event) -> None:
    ready[index] = None
    has_ready.set()


def weight_versions(part: CompletionDelta | CompletionOutput) -> list[WeightVersionSpan] | UnsetType:
    """Return the versions of a whole completion or of a last delta, for answers of OpenAI's API.

    UNSET if all tokens come from the weights of the checkpoint: most users of that API do not need the field.
    """
    spans = part.weight_versions
    return UNSET if not spans or all(span.version == FIRST_WEIGHT_VERSION for span in spans) else spans
