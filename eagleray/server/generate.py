"""/inference/v1/generate: token ids in, token ids out. Needs no tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.messages.sampling import RequestOutputKind, SamplingParams
from eagleray.server.body import Null
from eagleray.server.fields import SAMPLING_NAMES, SamplingFields, StreamOptions, Timeout
from eagleray.server.generation import Generation, GenerationGroup, Usage
from eagleray.server.generation_route import ParsedRequest
from eagleray.server.logprobs import ChatLogprobs, PromptLogprobList, chat_logprobs
from eagleray.server.routed_experts import RoutedExpertsField, RoutedExpertsFormat, routed_experts
from eagleray.server.weight_versions import WeightVersionsField


class GenerateSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`SamplingParams`. Nothing is detokenized unless stop strings need it."""

    logprobs: Annotated[
        int | None,
        Meta(description="Report each token and this many likeliest; 0: the token alone, -1: the whole vocabulary."),
    ] = None
    spaces_between_special_tokens: bool | None = None
    skip_reading_prefix_cache: Annotated[
        bool | None, Meta(description="Compute the whole prompt even if the prefix cache has a part of it.")
    ] = None
    output_kind: Annotated[
        RequestOutputKind | None, Meta(description="No effect: `stream` decides between one answer and events.")
    ] = None
    skip_clone: bool | None = None
    flat_logprobs: bool | None = None
    stream_interval: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    structured_outputs: Null = None
    thinking_token_budget: int | None = None
    repetition_detection: Null = None
    trace_decode_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None


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
    weight_versions: WeightVersionsField = UNSET


class GenerateResponse(msgspec.Struct, kw_only=True):
    """A whole answer, or with `stream` one event of it."""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: PromptLogprobList | None = None
    usage: Usage | UnsetType | None = UNSET


OWN_NAMES = tuple(GenerateSampling.__annotations__)
"""The fields of `SamplingParams` that this route alone has."""

FIELD_NAMES = {name: f"sampling_params.{name}" for name in (*SAMPLING_NAMES, *OWN_NAMES)} | {"prompt": "token_ids"}


class ParsedGenerate(ParsedRequest[GenerateRequest, GenerateResponse]):
    path = "/inference/v1/generate"
    summary = "Continue token ids."
    body_type = GenerateRequest
    response_type = GenerateResponse
    chunk_type = GenerateResponse
    logprobs_type = ChatLogprobs
    gives_msgpack = True
    field_names = FIELD_NAMES

    def _sampling_params(self) -> SamplingParams:
        fields = self.body.sampling_params
        given = {name: value for name in OWN_NAMES if (value := getattr(fields, name)) is not None}
        decided: dict[str, Any] = {"logprobs": fields.logprobs} | given
        if fields.detokenize is None:
            decided["detokenize"] = bool(fields.stop)
        if fields.return_routed_experts is None:
            decided["return_routed_experts"] = self.service.keeps_routed_experts
        return self._merge_sampling(fields, **decided)

    async def _make_prompts(self) -> list[Prompt]:
        return [Prompt(token_ids=self.body.token_ids)]

    def _logprobs(self, generation: Generation, delta: CompletionDelta) -> ChatLogprobs:
        return chat_logprobs(delta, self.task.params.logprobs or 0, None)

    async def _choice(
        self, generation: Generation, output: CompletionOutput, logprobs: ChatLogprobs | None
    ) -> GenerateChoice:
        return self._make_choice(output, logprobs)

    async def _response(self, group: GenerationGroup, choices: list[GenerateChoice]) -> GenerateResponse:
        response = self._make_chunk(choices)
        await self._show_prompt(group.generations[0], response)
        return response

    def _chunk(self, generation: Generation, delta: CompletionDelta) -> GenerateResponse:
        logprobs = None if delta.logprobs is None else self._logprobs(generation, delta)
        return self._make_chunk([self._make_choice(delta, logprobs)])

    async def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[GenerateResponse]:
        chunk = self._chunk(generation, delta)
        if len(generation.text_offsets) == 1:  # the first event of all
            await self._show_prompt(generation, chunk)
        yield chunk

    def _make_chunk(self, choices: list[GenerateChoice]) -> GenerateResponse:
        return GenerateResponse(request_id=self.body.request_id or self.id, choices=choices, usage=self.usage)

    async def _show_prompt(self, generation: Generation, response: GenerateResponse) -> None:
        logprobs = await self._prompt_logprobs(generation, self.task.params.prompt_logprobs)
        response.prompt_logprobs = None if logprobs is UNSET else logprobs

    def _make_choice(self, part: CompletionDelta | CompletionOutput, logprobs: ChatLogprobs | None) -> GenerateChoice:
        choice = GenerateChoice(
            index=part.index,
            token_ids=part.token_ids,
            logprobs=logprobs,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )
        if part.weight_versions is not None:
            choice.weight_versions = part.weight_versions
        if part.routed_experts is not None:
            choice.routed_experts = routed_experts(part, self.body.routed_experts_format)
        return choice
