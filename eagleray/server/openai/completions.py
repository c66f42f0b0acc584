"""/v1/completions: texts or token ids go on."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from eagleray.client import CompletionDelta, CompletionOutput, Prompt, Tokenizer
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import SamplingParams
from eagleray.server.body import BodyDecoder
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.fields import StreamOptions, sampling_params, stream_options
from eagleray.server.generation import Generation, Generations, Order, all_of
from eagleray.server.headers import ROUTING_HEADERS
from eagleray.server.logprobs import CompletionLogprobs, Position, completion_logprobs, prompt_logprobs
from eagleray.server.openai.requests import CompletionRequest
from eagleray.server.openai.responses import CompletionChoice, CompletionResponse
from eagleray.server.replies import Emit, EventStream, json_reply, unless_disconnected
from eagleray.server.routed_experts import routed_experts
from eagleray.server.service import Service
from eagleray.server.usage import Usage, total_usage, usage_so_far

__all__ = ["CompletionRoute"]

DEFAULT_MAX_TOKENS = 16

TOKENIZE_AT_ONCE = 16
"""After so many prompts that are short enough to be tokenized in the event loop, others get their turn."""


class Job(NamedTuple):
    """A request that was understood: what to generate, and how to tell it."""

    body: CompletionRequest
    order: Order
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
        return json_reply(await unless_disconnected(request.receive, self._whole(job)))

    async def _read(self, request: Request) -> Job:
        body = await self._body.read(request)
        self._service.check_model(body.model)
        self._service.check_open()
        options = stream_options(body.stream, body.stream_options)
        parts = _parts(body)
        order = Order.of(
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
        async with Generations(self._service, job.order) as generations:
            outputs = await all_of([generation.result() for generation in generations.each])
        choices = []
        for writer, output in zip(_writers(job, generations), outputs, strict=True):
            choices += [writer.choice(part) for part in output.outputs]
        return job.answer(choices, total_usage(generations.each))

    async def _stream(self, job: Job, emit: Emit) -> None:
        async with Generations(self._service, job.order) as generations:

            async def tell(writer: Writer) -> None:
                async for news in writer.generation:
                    for part in news:
                        begins = not writer.has_begun(part.index)  # told at once, even without a text yet
                        choice = writer.choice(part)
                        if begins or choice.says_something:
                            await emit(job.answer([choice], usage_so_far(job.options, generations.each)))

            await all_of([tell(writer) for writer in _writers(job, generations)])
        if job.options.include_usage:
            await emit(job.answer([], total_usage(generations.each)))


def _parts(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a request, each a text or token ids. Raises `InvalidRequest`."""
    parts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not parts:
        raise InvalidRequest("`prompt` is empty; give a text, or token ids", param="prompt")
    token_ids = [part for part in parts if isinstance(part, int)]
    prompts: list[str | list[int]] = [part for part in parts if not isinstance(part, int)]
    if token_ids and prompts:
        raise InvalidRequest(
            "`prompt` mixes token ids with whole prompts; put the ids of each prompt into a list of their own",
            param="prompt",
        )
    prompts = prompts or [token_ids]
    if body.add_special_tokens and any(isinstance(prompt, list) for prompt in prompts):
        raise InvalidRequest(
            "`add_special_tokens` is for texts: token ids are taken as they are", param="add_special_tokens"
        )
    return prompts


class Writer:
    """The choices of one prompt, whole or in pieces. The first piece of each also tells what is asked of the prompt."""

    def __init__(self, job: Job, prompt: Prompt, generation: Generation, *, first_index: int) -> None:
        self.generation = generation
        self._body = job.body
        self._prompt = prompt
        self._first_index = first_index
        self._tokenizer = job.tokenizer
        self._offsets: dict[int, int] = {}
        """Length of the text told so far of each completion, as its tokens' texts add up."""

    def has_begun(self, index: int) -> bool:
        """Whether something was told of that completion."""
        return index in self._offsets

    def choice(self, part: CompletionDelta | CompletionOutput) -> CompletionChoice:
        """What to tell of this part of a completion."""
        begins = not self.has_begun(part.index)
        choice = CompletionChoice(
            index=self._first_index + part.index,
            text=part.text,
            logprobs=self._logprobs(part, begins),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            routed_experts=routed_experts(part, self._body.routed_experts_format),
        )
        if self._body.return_token_ids:
            choice.token_ids = part.token_ids
        if begins:
            self._tell_prompt(choice)
        return choice

    def _tell_prompt(self, choice: CompletionChoice) -> None:
        if self._body.echo:
            choice.text = self._prompt_text() + choice.text
        if self._body.return_token_ids:
            choice.prompt_token_ids = self.generation.prompt_token_ids
        if self._body.prompt_logprobs is not None and self.generation.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self.generation.prompt_logprobs, self._body.prompt_logprobs)

    def _prompt_text(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        return self._tokenizer.decode(self.generation.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(self, part: CompletionDelta | CompletionOutput, begins: bool) -> CompletionLogprobs | None:
        offset = self._offsets.setdefault(part.index, 0)
        if part.logprobs is None:
            return None
        token_ids: Sequence[int] = part.token_ids
        positions: Sequence[Position | None] = part.logprobs
        if begins and self._body.echo and self.generation.prompt_logprobs is not None:
            token_ids = [*self.generation.prompt_token_ids, *token_ids]
            positions = [*self.generation.prompt_logprobs, *positions]
        logprobs = completion_logprobs(token_ids, positions, self._body.logprobs or 0, offset, self._tokenizer)
        self._offsets[part.index] += sum(map(len, logprobs.tokens))
        return logprobs


def _writers(job: Job, generations: Generations) -> list[Writer]:
    pairs = zip(generations.prompts, generations.each, strict=True)
    return [
        Writer(job, prompt, generation, first_index=place * job.order.params.n)
        for place, (prompt, generation) in enumerate(pairs)
    ]
