"""/v1/completions: texts or token ids go on."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from msgspec import UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import SamplingParams
from eagleray.server.body import BodyDecoder
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.fields import StreamOptions, sampling_params, stream_options
from eagleray.server.generation import Generation, GenerationGroup, GenerationTask
from eagleray.server.headers import ROUTING_HEADERS
from eagleray.server.http_responses import Emit, EventStream, json_response, unless_disconnected
from eagleray.server.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsCollector,
    Position,
    completion_logprobs,
    encoded_prompt_logprobs,
    slices,
)
from eagleray.server.openai.requests import CompletionRequest
from eagleray.server.openai.responses import CompletionChoice, CompletionResponse
from eagleray.server.routed_experts import routed_experts
from eagleray.server.service import Service
from eagleray.server.usage import Usage, total_usage, usage_so_far

DEFAULT_MAX_TOKENS = 16

TOKENIZE_AT_ONCE = 16
"""Number of short prompts that are tokenized before the event loop serves others."""


class Job(NamedTuple):
    """A request that was understood: what to generate, and how to tell it."""

    body: CompletionRequest
    order: GenerationTask
    options: StreamOptions
    model: str
    tokenizer: Tokenizer
    created: int

    def answer(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        """The whole answer, or an event."""
        return CompletionResponse(
            id=f"cmpl-{self.order.request_id}", created=self.created, model=self.model, choices=choices, usage=usage
        )


class CompletionRoute:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._body = BodyDecoder(CompletionRequest, service.body_limits)

    def endpoints(self) -> list[Endpoint]:
        create = Operation(
            self.create,
            "Continue a text.",
            takes=CompletionRequest,
            gives=CompletionResponse,
            streams=CompletionResponse,
            headers=ROUTING_HEADERS,
            refuses=(400, 404, 413, 429, 500, 503, 504),
        )
        return [Endpoint("/v1/completions", post=create)]

    async def create(self, request: Request) -> ASGIApp:
        job = await self._read(request)
        if job.body.stream:
            return EventStream(functools.partial(self._stream, job), job.order.request_id)
        return json_response(await unless_disconnected(request.receive, self._whole(job)))

    async def _read(self, request: Request) -> Job:
        body = await self._body.read(request)
        self._service.check_model(body.model)
        self._service.check_open()
        options = stream_options(body.stream, body.stream_options)
        parts = _parts(body)
        order = GenerationTask.of(
            self._service,
            request,
            body,
            num_prompts=len(parts),
            make_prompts=functools.partial(self._prompts, parts, body),
            params=self._params(body),
            only_prompt=body.max_tokens == 0,
        )
        return Job(body, order, options, self._service.model_name, self._service.tokenizer, int(time.time()))

    async def _prompts(self, parts: Sequence[str | list[int]], body: CompletionRequest) -> list[Prompt]:
        prompts = []
        for part in parts:
            prompts.append(await self._prompt(part, body))
            if len(prompts) % TOKENIZE_AT_ONCE == 0:
                await asyncio.sleep(0)
        return prompts

    async def _prompt(self, part: str | list[int], body: CompletionRequest) -> Prompt:
        if isinstance(part, list):
            return Prompt(token_ids=part)
        token_ids = await self._service.text.encode(part, add_special_tokens=body.add_special_tokens is not False)
        return Prompt(part, token_ids)

    def _params(self, body: CompletionRequest) -> SamplingParams:
        decided: dict[str, int | None] = {"logprobs": body.logprobs}
        if body.max_tokens is None:
            decided["max_tokens"] = DEFAULT_MAX_TOKENS
        if body.max_tokens == 0 and body.echo:
            decided["max_tokens"] = 1
        if body.echo and body.logprobs is not None:
            decided["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        return sampling_params(body, self._service.default_sampling, **decided)

    async def _whole(self, job: Job) -> CompletionResponse:
        choices = []
        async with GenerationGroup(self._service, job.order) as generations:
            await generations.wait_until_ended()
            for writer in _writers(job, generations):
                choices += await writer.whole()
        return job.answer(choices, total_usage(generations.totals))

    async def _stream(self, job: Job, emit: Emit) -> None:
        async with GenerationGroup(self._service, job.order) as generations:
            writers = _writers(job, generations)
            async for place, news in generations.news():
                for part in news:
                    async for choice in writers[place].choices(part):
                        await emit(job.answer([choice], usage_so_far(job.options, generations.totals)))
        if job.options.include_usage:
            await emit(job.answer([], total_usage(generations.totals)))


def _parts(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a request, each a text or token ids. Raises `InvalidRequest`."""
    parts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not parts:
        raise InvalidRequest("`prompt` is empty; give a text, or token ids", param="prompt")
    kinds = set(map(type, parts))  # quick even for a million of them
    if int not in kinds:
        prompts: list[str | list[int]] = parts  # type: ignore[assignment]
    elif kinds == {int}:
        prompts = [parts]  # type: ignore[list-item]
    else:
        raise InvalidRequest(
            "`prompt` mixes token ids with whole prompts; put the ids of each prompt into a list of their own",
            param="prompt",
        )
    if body.add_special_tokens and any(isinstance(prompt, list) for prompt in prompts):
        raise InvalidRequest(
            "`add_special_tokens` is for texts: token ids are taken as they are", param="add_special_tokens"
        )
    return prompts


class Writer:
    """The choices of one prompt, whole or in pieces. The first piece of each also tells what is asked of the prompt."""

    def __init__(self, job: Job, prompt: Prompt, generation: Generation, *, first_index: int) -> None:
        self._generation = generation
        self._body = job.body
        self._has_logprobs = job.order.has_logprobs
        self._prompt = prompt
        self._first_index = first_index
        self._tokenizer = job.tokenizer
        self._offsets: dict[int, int] = {}
        """Length of the text told so far of each completion, as its tokens' texts add up."""

    async def choices(self, part: CompletionDelta) -> AsyncIterator[CompletionChoice]:
        """Yield the choices for this part of a completion. Those of a long prompt's log-probabilities are several."""
        begins = part.index not in self._offsets  # told at once, even without a text yet
        self._offsets.setdefault(part.index, 0)
        choice = self._choice(part)
        if begins:
            await self._tell_prompt(choice)
            async for logprobs in self._echoed_logprobs(part.index):
                if choice.logprobs is not None:
                    yield choice
                    choice = CompletionChoice(index=choice.index, text="")
                choice.logprobs = logprobs
        own = self._logprobs(part)
        if choice.logprobs is None:
            choice.logprobs = own
        elif own is not None:
            choice.logprobs = choice.logprobs.extended(own)
        self._tell_end(choice, part)
        if begins or choice.says_something:
            yield choice

    async def whole(self) -> list[CompletionChoice]:
        """All choices, when the prompt's generation has ended."""
        collectors: defaultdict[int, CompletionLogprobsCollector] = defaultdict(CompletionLogprobsCollector)

        async def collect(part: CompletionDelta) -> None:
            if part.index not in self._offsets:
                self._offsets[part.index] = 0
                async for echoed in self._echoed_logprobs(part.index):
                    collectors[part.index].add(echoed)
            if (logprobs := self._logprobs(part)) is not None:
                collectors[part.index].add(logprobs)

        output = await self._generation.result(collect)
        choices = []
        for part in output.outputs:
            choice = self._choice(part)
            await self._tell_prompt(choice)
            if self._has_logprobs:
                choice.logprobs = collectors[part.index].take()
            self._tell_end(choice, part)
            choices.append(choice)
        return choices

    def _choice(self, part: CompletionDelta | CompletionOutput) -> CompletionChoice:
        choice = CompletionChoice(index=self._first_index + part.index, text=part.text)
        if self._body.return_token_ids:
            choice.token_ids = part.token_ids
        choice.routed_experts = routed_experts(part, self._body.routed_experts_format)
        return choice

    def _tell_end(self, choice: CompletionChoice, part: CompletionDelta | CompletionOutput) -> None:
        choice.finish_reason, choice.stop_reason = part.finish_reason, part.stop_reason

    async def _tell_prompt(self, choice: CompletionChoice) -> None:
        generation = self._generation
        if self._body.echo:
            choice.text = self._prompt_text() + choice.text
        if self._body.return_token_ids:
            choice.prompt_token_ids = generation.prompt_token_ids
        if self._body.prompt_logprobs is not None and generation.prompt_logprobs is not None:
            choice.prompt_logprobs = await encoded_prompt_logprobs(
                generation.prompt_logprobs, self._body.prompt_logprobs
            )

    def _prompt_text(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        return self._tokenizer.decode(self._generation.prompt_token_ids, skip_special_tokens=False)

    async def _echoed_logprobs(self, index: int) -> AsyncIterator[CompletionLogprobs]:
        """Yield the log-probabilities of the prompt in pieces, if the request asks for them and echoes the prompt."""
        positions = self._generation.prompt_logprobs
        if not self._body.echo or self._body.logprobs is None or positions is None:
            return
        for start, end in slices(len(positions), self._body.logprobs):
            token_ids = self._generation.prompt_token_ids[start:end]
            yield self._formatted(index, token_ids, positions[start:end])
            await asyncio.sleep(0)

    def _logprobs(self, part: CompletionDelta) -> CompletionLogprobs | None:
        return None if part.logprobs is None else self._formatted(part.index, part.token_ids, part.logprobs)

    def _formatted(
        self, index: int, token_ids: Sequence[int], positions: Sequence[Position | None]
    ) -> CompletionLogprobs:
        offset, k = self._offsets[index], self._body.logprobs or 0
        logprobs = completion_logprobs(token_ids, positions, k, offset, self._tokenizer)
        self._offsets[index] += sum(map(len, logprobs.tokens))
        return logprobs


def _writers(job: Job, generations: GenerationGroup) -> list[Writer]:
    pairs = zip(generations.prompts, generations.each, strict=True)
    return [
        Writer(job, prompt, generation, first_index=place * job.order.params.n)
        for place, (prompt, generation) in enumerate(pairs)
    ]
