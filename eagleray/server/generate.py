"""/inference/v1/generate: token ids in, token ids out. Needs no tokenizer."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.server.body import field_names
from eagleray.server.fields import SAMPLING_NAMES, SamplingFields, StreamOptions, Timeout
from eagleray.server.generation import Generation, GenerationGroup, GenerationTask, Usage
from eagleray.server.generation_route import GenerationRoute, ParsedRequest
from eagleray.server.logprobs import ChatLogprobs, PromptLogprobList, chat_logprobs
from eagleray.server.routed_experts import RoutedExpertsField, RoutedExpertsFormat, routed_experts
from eagleray.server.service import Service


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
"""This route's names of fields that the client calls by others."""

Parsed = ParsedRequest[GenerateRequest]


class GenerateRoute(GenerationRoute[GenerateRequest, GenerateResponse]):
    def __init__(self, service: Service) -> None:
        super().__init__(
            service,
            "/inference/v1/generate",
            "Continue token ids.",
            request_body=GenerateRequest,
            response=GenerateResponse,
            stream_event=GenerateResponse,
            logprobs=ChatLogprobs,
            gives_msgpack=True,
        )

    def _make_task(self, body: GenerateRequest, request: Request) -> GenerationTask:
        fields = body.sampling_params
        decided: dict[str, int | bool | None] = {"logprobs": fields.logprobs}
        if fields.detokenize is None:
            decided["detokenize"] = bool(fields.stop)
        if fields.return_routed_experts is None:
            decided["return_routed_experts"] = self._service.keeps_routed_experts
        with field_names(FIELD_NAMES):
            return self._task(
                body,
                request,
                make_prompts=functools.partial(_prompts, body.token_ids),
                params=self._sampling_params(fields, **decided),
                field_names=FIELD_NAMES,
            )

    def _logprobs(self, parsed: Parsed, generation: Generation, delta: CompletionDelta) -> ChatLogprobs:
        return chat_logprobs(delta, parsed.task.params.logprobs or 0, None)

    async def _choice(
        self,
        parsed: Parsed,
        generation: Generation,
        output: CompletionOutput,
        logprobs: ChatLogprobs | None,
    ) -> GenerateChoice:
        return self._make_choice(parsed, output, logprobs)

    async def _response(
        self, parsed: Parsed, group: GenerationGroup, choices: list[GenerateChoice]
    ) -> GenerateResponse:
        response = self._make_chunk(parsed, choices)
        await self._show_prompt(parsed, group.generations[0], response)
        response.usage = group.usage
        return response

    def _chunk(self, parsed: Parsed, generation: Generation, delta: CompletionDelta) -> GenerateResponse:
        logprobs = None if delta.logprobs is None else self._logprobs(parsed, generation, delta)
        return self._make_chunk(parsed, [self._make_choice(parsed, delta, logprobs)])

    async def _first_chunks(
        self, parsed: Parsed, generation: Generation, delta: CompletionDelta
    ) -> AsyncIterator[GenerateResponse]:
        chunk = self._chunk(parsed, generation, delta)
        if len(generation.text_offsets) == 1:  # the first event of all
            await self._show_prompt(parsed, generation, chunk)
        yield chunk

    def _make_chunk(self, parsed: Parsed, choices: list[GenerateChoice]) -> GenerateResponse:
        return GenerateResponse(request_id=parsed.body.request_id or parsed.task.request_id, choices=choices)

    async def _show_prompt(self, parsed: Parsed, generation: Generation, response: GenerateResponse) -> None:
        logprobs = await self._prompt_logprobs(parsed, generation, parsed.task.params.prompt_logprobs)
        response.prompt_logprobs = None if logprobs is UNSET else logprobs

    def _make_choice(
        self,
        parsed: Parsed,
        part: CompletionDelta | CompletionOutput,
        logprobs: ChatLogprobs | None,
    ) -> GenerateChoice:
        choice = GenerateChoice(
            index=part.index,
            token_ids=part.token_ids,
            logprobs=logprobs,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )
        if part.routed_experts is not None:
            choice.routed_experts = routed_experts(part, parsed.body.routed_experts_format)
        return choice


async def _prompts(token_ids: list[int]) -> list[Prompt]:
    return [Prompt(token_ids=token_ids)]
