"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from typing import NamedTuple

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import SamplingParams
from eagleray.server.body import BodyDecoder, field_names
from eagleray.server.chat_messages import render_chat
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.fields import StreamOptions, sampling_params, stream_options
from eagleray.server.generation import Generation, GenerationGroup, GenerationTask
from eagleray.server.headers import ROUTING_HEADERS
from eagleray.server.http_responses import Emit, EventStream, json_response, unless_disconnected
from eagleray.server.logprobs import (
    ChatLogprobs,
    ChatLogprobsCollector,
    PromptLogprobList,
    chat_logprobs,
    encoded_prompt_logprobs,
)
from eagleray.server.openai.requests import ChatRequest
from eagleray.server.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatResponse,
)
from eagleray.server.routed_experts import routed_experts
from eagleray.server.service import Service
from eagleray.server.usage import total_usage, usage_so_far

FIELD_NAMES = {"prompt": "messages"}
"""Where this route has what the client calls by these names."""


class Job(NamedTuple):
    """A request that was understood: what to generate, and how to tell it."""

    body: ChatRequest
    order: GenerationTask
    options: StreamOptions
    created: int

    @property
    def id(self) -> str:
        return f"chatcmpl-{self.order.request_id}"

    @property
    def has_logprobs(self) -> bool:
        return self.order.has_logprobs


class ChatRoute:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._body = BodyDecoder(ChatRequest, service.body_limits)

    def endpoints(self) -> list[Endpoint]:
        create = Operation(
            self.create,
            "Answer in a conversation.",
            takes=ChatRequest,
            gives=ChatResponse,
            streams=ChatChunk,
            headers=ROUTING_HEADERS,
            refuses=(400, 404, 413, 429, 500, 503, 504),
        )
        return [Endpoint("/v1/chat/completions", post=create)]

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
        order = GenerationTask.of(
            self._service,
            request,
            body,
            make_prompts=functools.partial(self._prompts, body),
            params=self._params(body),
            field_names=FIELD_NAMES,
        )
        return Job(body, order, options, int(time.time()))

    async def _prompts(self, body: ChatRequest) -> list[Prompt]:
        text = await render_chat(self._service, body.messages, body)
        return [Prompt(text, await self._service.text.encode(text, add_special_tokens=bool(body.add_special_tokens)))]

    def _params(self, body: ChatRequest) -> SamplingParams:
        max_tokens = _max_tokens(body)
        if max_tokens is None:  # as the model's defaults say, or else as long as the model's length allows
            max_tokens = self._service.default_sampling.get("max_tokens")
        decided = {"logprobs": self._num_logprobs(body), "max_tokens": max_tokens}
        with field_names({"max_tokens": "max_completion_tokens"} if body.max_tokens is None else {}):
            return sampling_params(body, self._service.default_sampling, **decided)

    def _num_logprobs(self, body: ChatRequest) -> int | None:
        if body.top_logprobs is None:
            return 0 if body.logprobs else None
        if not body.logprobs:
            raise InvalidRequest("`top_logprobs` is only for requests with `logprobs` true", param="top_logprobs")
        if not 0 <= body.top_logprobs <= self._service.max_logprobs:
            raise InvalidRequest(
                f"`top_logprobs` must be between 0 and {self._service.max_logprobs}, but it is {body.top_logprobs}",
                param="top_logprobs",
            )
        return body.top_logprobs

    async def _whole(self, job: Job) -> ChatResponse:
        collectors: defaultdict[int, ChatLogprobsCollector] = defaultdict(ChatLogprobsCollector)

        async def collect(part: CompletionDelta) -> None:
            if (logprobs := self._logprobs(job, part)) is not None:
                collectors[part.index].add(logprobs)

        async with GenerationGroup(self._service, job.order) as generations:
            (generation,) = generations.each
            output = await generation.result(collect)
        return ChatResponse(
            id=job.id,
            created=job.created,
            model=self._service.model_name,
            choices=[
                self._choice(job, part, collectors[part.index].take() if job.has_logprobs else None)
                for part in output.outputs
            ],
            usage=total_usage(generations.totals),
            prompt_logprobs=await _prompt_logprobs(job, generation),
            prompt_token_ids=generation.prompt_token_ids if job.body.return_token_ids else UNSET,
        )

    def _choice(self, job: Job, part: CompletionOutput, logprobs: ChatLogprobs | None) -> ChatChoice:
        return ChatChoice(
            index=part.index,
            message=ChatMessage(content=part.text),
            logprobs=logprobs,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            token_ids=part.token_ids if job.body.return_token_ids else UNSET,
            routed_experts=routed_experts(part, job.body.routed_experts_format),
        )

    async def _stream(self, job: Job, emit: Emit) -> None:
        begun: set[int] = set()
        async with GenerationGroup(self._service, job.order) as generations:
            (generation,) = generations.each
            async for _, news in generations.news():
                for part in news:
                    chunk = self._chunk(job, self._chunk_choice(job, part, begins=part.index not in begun))
                    chunk.usage = usage_so_far(job.options, generations.totals)
                    if not begun:
                        chunk.prompt_logprobs = await _prompt_logprobs(job, generation)
                        chunk.prompt_token_ids = generation.prompt_token_ids if job.body.return_token_ids else UNSET
                    begun.add(part.index)
                    if chunk.choices[0].says_something:
                        await emit(chunk)
        if job.options.include_usage:
            last = self._chunk(job)
            last.usage = total_usage(generations.totals)
            await emit(last)

    def _chunk(self, job: Job, *choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(id=job.id, created=job.created, model=self._service.model_name, choices=[*choices])

    def _chunk_choice(self, job: Job, part: CompletionDelta, *, begins: bool) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=part.index,
            delta=ChatDelta(role="assistant" if begins else UNSET, content=part.text),
            logprobs=self._logprobs(job, part),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            token_ids=part.token_ids if job.body.return_token_ids else UNSET,
            routed_experts=routed_experts(part, job.body.routed_experts_format),
        )

    def _logprobs(self, job: Job, part: CompletionDelta) -> ChatLogprobs | None:
        if part.logprobs is None:
            return None
        return chat_logprobs(part.token_ids, part.logprobs, job.body.top_logprobs or 0, self._service.tokenizer)


def _max_tokens(body: ChatRequest) -> int | None:
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) == 2:
        raise InvalidRequest(
            "`max_tokens` is the older name of `max_completion_tokens`: give one of them", param="max_completion_tokens"
        )
    return next(iter(limits), None)


async def _prompt_logprobs(job: Job, generation: Generation) -> PromptLogprobList | UnsetType:
    if job.body.prompt_logprobs is None or generation.prompt_logprobs is None:
        return UNSET
    return await encoded_prompt_logprobs(generation.prompt_logprobs, job.body.prompt_logprobs)
