"""/inference/v1/generate: token ids in, token ids out. Needs no tokenizer."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.server.body import BodyDecoder, field_names
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.fields import (
    SAMPLING_NAMES,
    SamplingFields,
    StreamOptions,
    Timeout,
    sampling_params,
    stream_options,
)
from eagleray.server.generation import Generation, GenerationGroup, GenerationTask
from eagleray.server.headers import MSGPACK, ROUTING_HEADERS, accepts
from eagleray.server.http_responses import Emit, EventStream, json_response, msgpack_response, unless_disconnected
from eagleray.server.logprobs import (
    ChatLogprobs,
    ChatLogprobsCollector,
    PromptLogprobList,
    chat_logprobs,
    encoded_prompt_logprobs,
)
from eagleray.server.routed_experts import RoutedExpertsField, RoutedExpertsFormat, routed_experts
from eagleray.server.service import Service
from eagleray.server.usage import Usage, total_usage, usage_so_far


class GenerateSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`SamplingParams`. Nothing is detokenized unless stop strings need it."""

    logprobs: int | None = None


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Continue token ids."""

    request_id: Annotated[
        str | None, Meta(description="Shown in the answer. Default: the one of header X-Request-Id.")
    ] = None
    model: str | None = None
    token_ids: list[int]
    sampling_params: GenerateSampling
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: Timeout | None = None
    routed_experts_format: RoutedExpertsFormat | None = None


class GenerateChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    logprobs: Annotated[ChatLogprobs | None, Meta(description="Tokens are shown as `token_id:ID`.")] = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: RoutedExpertsField = UNSET


class GenerateResponse(msgspec.Struct, kw_only=True):
    """A whole answer, or with `stream` one event of it."""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: PromptLogprobList | None = None
    usage: Usage | UnsetType | None = UNSET


FIELD_NAMES = {name: f"sampling_params.{name}" for name in (*SAMPLING_NAMES, "logprobs")} | {"prompt": "token_ids"}
"""Where this route has what the client calls by these names."""


class Job(NamedTuple):
    """A request that was understood: what to generate, and how to tell it."""

    body: GenerateRequest
    order: GenerationTask
    options: StreamOptions

    def answer(self, choices: list[GenerateChoice], usage: Usage | UnsetType | None) -> GenerateResponse:
        """The whole answer, or an event."""
        return GenerateResponse(request_id=self.body.request_id or self.order.request_id, choices=choices, usage=usage)


class GenerateRoute:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._body = BodyDecoder(GenerateRequest, service.body_limits)

    def endpoints(self) -> list[Endpoint]:
        create = Operation(
            self.create,
            "Continue token ids.",
            takes=GenerateRequest,
            gives=GenerateResponse,
            gives_msgpack=True,
            streams=GenerateResponse,
            headers=ROUTING_HEADERS,
            refuses=(400, 404, 413, 429, 500, 503, 504),
        )
        return [Endpoint("/inference/v1/generate", post=create)]

    async def create(self, request: Request) -> ASGIApp:
        body = await self._body.read(request)
        self._service.check_model(body.model)
        self._service.check_open()
        with field_names(FIELD_NAMES):
            job = self._read(body, request)
        if body.stream:
            return EventStream(functools.partial(self._stream, job), job.order.request_id)
        is_msgpack = accepts(request.headers, MSGPACK)
        answer = await unless_disconnected(request.receive, self._whole(job, is_msgpack=is_msgpack))
        return msgpack_response(answer) if is_msgpack else json_response(answer)

    def _read(self, body: GenerateRequest, request: Request) -> Job:
        fields = body.sampling_params
        decided: dict[str, int | bool | None] = {"logprobs": fields.logprobs}
        if fields.detokenize is None:
            decided["detokenize"] = bool(fields.stop)
        if fields.return_routed_experts is None:
            decided["return_routed_experts"] = self._service.keeps_routed_experts
        order = GenerationTask.of(
            self._service,
            request,
            body,
            make_prompts=functools.partial(_prompts, body.token_ids),
            params=sampling_params(fields, self._service.default_sampling, **decided),
            field_names=FIELD_NAMES,
        )
        return Job(body, order, stream_options(body.stream, body.stream_options))

    async def _whole(self, job: Job, *, is_msgpack: bool) -> GenerateResponse:
        collectors: defaultdict[int, ChatLogprobsCollector] = defaultdict(
            functools.partial(ChatLogprobsCollector, is_msgpack=is_msgpack)
        )

        async def collect(part: CompletionDelta) -> None:
            if (logprobs := _logprobs(job, part)) is not None:
                collectors[part.index].add(logprobs)

        async with GenerationGroup(self._service, job.order) as generations:
            (generation,) = generations.each
            output = await generation.result(collect)
        has_logprobs = job.order.has_logprobs
        choices = [
            _choice(job, part, collectors[part.index].take() if has_logprobs else None) for part in output.outputs
        ]
        answer = job.answer(choices, total_usage(generations.totals))
        answer.prompt_logprobs = await _prompt_logprobs(job, generation, is_msgpack=is_msgpack)
        return answer

    async def _stream(self, job: Job, emit: Emit) -> None:
        begun = False
        async with GenerationGroup(self._service, job.order) as generations:
            (generation,) = generations.each
            async for _, news in generations.news():
                for part in news:
                    choice = _choice(job, part, _logprobs(job, part))
                    event = job.answer([choice], usage_so_far(job.options, generations.totals))
                    if not begun:
                        begun, event.prompt_logprobs = True, await _prompt_logprobs(job, generation)
                    await emit(event)
        if job.options.include_usage:
            await emit(job.answer([], total_usage(generations.totals)))


async def _prompts(token_ids: list[int]) -> list[Prompt]:
    return [Prompt(token_ids=token_ids)]


def _choice(job: Job, part: CompletionDelta | CompletionOutput, logprobs: ChatLogprobs | None) -> GenerateChoice:
    return GenerateChoice(
        index=part.index,
        token_ids=part.token_ids,
        logprobs=logprobs,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        routed_experts=routed_experts(part, job.body.routed_experts_format),
    )


def _logprobs(job: Job, part: CompletionDelta) -> ChatLogprobs | None:
    if part.logprobs is None:
        return None
    return chat_logprobs(part.token_ids, part.logprobs, job.order.params.logprobs or 0, None)


async def _prompt_logprobs(job: Job, generation: Generation, *, is_msgpack: bool = False) -> PromptLogprobList | None:
    if generation.prompt_logprobs is None:
        return None
    k = job.order.params.prompt_logprobs or 0
    return await encoded_prompt_logprobs(generation.prompt_logprobs, k, is_msgpack=is_msgpack)
