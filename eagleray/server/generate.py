"""/inference/v1/generate: takes token ids and returns token ids, or a text, which alone needs a tokenizer.

Bodies and answers are those of vLLM. As there, the model's generation_config.json does not change sampling parameters
that the body leaves out, so a trainer knows the distribution; only its limit of tokens counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.server.field_fates import GENERATE_FATES
from eagleray.server.fields import SAMPLING_NAMES, SamplingFields, ShortText, StreamOptions, Timeout
from eagleray.server.generation import Generation, GenerationGroup, Usage, WeightVersionsField
from eagleray.server.generation_route import ParsedRequest
from eagleray.server.logprobs import (
    ChatLogprobs,
    GenerateLogprobs,
    PromptLogprobList,
    chat_logprobs,
    generate_logprobs,
)
from eagleray.server.routed_experts import (
    RoutedExpertsField,
    RoutedExpertsFormat,
    compact_routed_experts,
    npy_bytes,
    routed_experts,
)
from eagleray.server.service import Service

OutputMode = Literal["tokens", "text"]

AnyLogprobs = GenerateLogprobs | ChatLogprobs


class GenerateSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`SamplingParams`. Nothing is detokenized unless stop strings need it."""

    logprobs: Annotated[
        int | None,
        Meta(description="Report each token and this many likeliest; 0: the token alone, -1: the whole vocabulary."),
    ] = None
    skip_reading_prefix_cache: Annotated[
        bool | None, Meta(description="Compute the whole prompt even if the prefix cache has a part of it.")
    ] = None
    prompt_logprob_token_ids: Annotated[
        list[list[int]] | None,
        Meta(
            description="Token ids to score at positions of the prompt: row i as continuations of the tokens up to "
            "`prompt_logprob_start` + i; -1 fills short rows. Not with `stream`."
        ),
    ] = None
    prompt_logprob_start: Annotated[int | None, Meta(description="First position of the prompt that has a row.")] = None
    kept_special_token_ids: Annotated[
        list[int] | None, Meta(description="Special tokens that texts have although `skip_special_tokens` is on.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None, Meta(description="Constraint of the text. Needs the server's tokenizer.")
    ] = None
    trace_decode_token_ids: Annotated[
        list[int] | None,
        Meta(description="Generate these tokens, and report what the model thinks of them. The last one is the end."),
    ] = None


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Continue token ids."""

    request_id: Annotated[
        ShortText | None,
        Meta(description="Shown in the answer, and names the request in calls that abort it. Default: X-Request-Id."),
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
    output_mode: Annotated[
        OutputMode | None, Meta(description="tokens (default): token ids alone. text: a text beside them.")
    ] = None
    return_token_ids: Annotated[
        bool | None, Meta(description="Also give the token ids of the prompt. Those of the completions always come.")
    ] = None


class GenerateChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    text: Annotated[str | UnsetType, Meta(description="With `output_mode` text.")] = UNSET
    logprobs: Annotated[
        Any,
        Meta(
            description="null, or by token ids. With `output_mode` text those of /v1/chat/completions.",
            extra_json_schema={"anyOf": [{"type": "object"}, {"type": "null"}]},
        ),
    ] = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: RoutedExpertsField | None = UNSET
    weight_versions: WeightVersionsField = UNSET
    sampling_mask: UnsetType | None = UNSET


class GenerateResponse(msgspec.Struct, kw_only=True):
    """A whole answer, or with `stream` one event of it."""

    request_id: str
    model: str
    created: int
    output_mode: OutputMode
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_id_logprobs: Annotated[
        bytes | UnsetType | None,
        Meta(description="The scores of `prompt_logprob_token_ids`: a .npy file of its shape; base64 in JSON."),
    ] = UNSET
    kv_transfer_params: None = None
    # Fields of vLLM's whole answers, for features that do not exist here.
    mm_placeholders: UnsetType | None = UNSET
    metrics: UnsetType | None = UNSET
    ec_transfer_params: UnsetType | None = UNSET


WHOLE_NAMES = ("prompt_token_ids", "prompt_token_id_logprobs", "mm_placeholders", "metrics", "ec_transfer_params")
"""Fields that events do not have and whole answers have as null."""

OWN_NAMES = tuple(GenerateSampling.__annotations__)
"""Fields of `SamplingParams` that only this route has."""

FIELD_NAMES = {name: f"sampling_params.{name}" for name in (*SAMPLING_NAMES, *OWN_NAMES)} | {"prompt": "token_ids"}


class ParsedGenerate(ParsedRequest[GenerateRequest, GenerateResponse]):
    path = "/inference/v1/generate"
    summary = "Continue token ids."
    body_type = GenerateRequest
    response_type = GenerateResponse
    chunk_type = GenerateResponse
    logprobs_type: type[msgspec.Struct] = GenerateLogprobs
    gives_msgpack = True
    field_names = FIELD_NAMES
    fates = GENERATE_FATES

    def __init__(self, service: Service, body: GenerateRequest, request: Request) -> None:
        super().__init__(service, body, request)
        self.shows_token_ids = True  # those of completions; `return_token_ids` is about the prompt
        if self._shows_text:
            self.logprobs_type = ChatLogprobs

    def _sampling_params(self) -> SamplingParams:
        fields = self.body.sampling_params
        names = (*SAMPLING_NAMES, *OWN_NAMES)
        given = {name: value for name in names if (value := getattr(fields, name)) is not None}
        given.setdefault("max_tokens", self.service.default_sampling.get("max_tokens"))
        given.setdefault("detokenize", bool(fields.stop) or self._shows_text)
        given.setdefault("return_routed_experts", self.service.keeps_routed_experts)
        if fields.prompt_logprob_token_ids and self.body.stream:
            raise InvalidRequest(
                "`prompt_logprob_token_ids` is not for streams: leave out `stream`", param="prompt_logprob_token_ids"
            )
        if self._shows_text:
            self._check_text(detokenize=given["detokenize"])
        return SamplingParams(**given)

    @property
    def _shows_text(self) -> bool:
        return self.body.output_mode == "text"

    def _check_text(self, *, detokenize: bool) -> None:
        """Raise `InvalidRequest` if the answer cannot have a text."""
        if not detokenize:
            raise InvalidRequest(
                "`output_mode` text needs `detokenize`, which is false in `sampling_params`: drop one of them",
                param="output_mode",
            )
        if self.service.client.tokenizer is None:
            raise InvalidRequest(
                "`output_mode` text needs a tokenizer, which this server does not have (its option "
                "`skip_tokenizer_init`): ask for tokens",
                param="output_mode",
            )

    async def make_prompts(self) -> list[Prompt]:
        return [Prompt(token_ids=self.body.token_ids)]

    def _logprobs(self, generation: Generation, delta: CompletionDelta) -> AnyLogprobs:
        k = self.task.params.logprobs or 0
        if not self._shows_text:
            return generate_logprobs(delta, k)
        return chat_logprobs(delta, k, self.service.tokenizer, as_ids=self.names_tokens_by_id)

    async def _choice(
        self, generation: Generation, output: CompletionOutput, logprobs: AnyLogprobs | None
    ) -> GenerateChoice:
        return self._make_choice(output, logprobs)

    async def _response(self, group: GenerationGroup, choices: list[GenerateChoice]) -> GenerateResponse:
        response = self._make_chunk(choices)
        for name in WHOLE_NAMES:
            setattr(response, name, None)
        await self._show_prompt(group.generations[0], response)
        return response

    def _chunks(self, generation: Generation, delta: CompletionDelta) -> list[GenerateResponse]:
        return [] if self._is_empty(delta) else [self._chunk(generation, delta)]

    def _chunk(self, generation: Generation, delta: CompletionDelta) -> GenerateResponse:
        logprobs = None if delta.logprobs is None else self._logprobs(generation, delta)
        return self._make_chunk([self._make_choice(delta, logprobs)])

    async def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[GenerateResponse]:
        chunk = self._chunk(generation, delta)
        if len(generation.text_offsets) == 1:  # the first event of all
            await self._show_prompt(generation, chunk)
        yield chunk

    def _make_chunk(self, choices: list[GenerateChoice]) -> GenerateResponse:
        return GenerateResponse(
            request_id=self.body.request_id or self.id,
            model=self.model_name,
            created=self.created,
            output_mode=self.body.output_mode or "tokens",
            choices=choices,
            usage=self.usage,
        )

    async def _show_prompt(self, generation: Generation, response: GenerateResponse) -> None:
        logprobs = await self._prompt_logprobs(generation, self.task.params.prompt_logprobs)
        response.prompt_logprobs = None if logprobs is UNSET else logprobs
        if generation.prompt_scores is not None:
            response.prompt_token_id_logprobs = npy_bytes(generation.prompt_scores)
        if self.body.return_token_ids:
            response.prompt_token_ids = generation.prompt_token_ids

    def _make_choice(self, part: CompletionDelta | CompletionOutput, logprobs: AnyLogprobs | None) -> GenerateChoice:
        choice = GenerateChoice(
            index=part.index,
            token_ids=part.token_ids,
            logprobs=logprobs,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )
        if part.weight_versions is not None:
            choice.weight_versions = part.weight_versions
        if isinstance(part, CompletionOutput):
            choice.routed_experts = choice.sampling_mask = None
        if self._shows_text:
            choice.text = part.text
        if part.routed_experts is not None:
            choice.routed_experts = routed_experts(part, self.body.routed_experts_format)
        return choice


class ParsedSkyrlGenerate(ParsedGenerate):
    """The same with routed experts in the form that SkyRL's client reads."""

    path = "/skyrl/v1/generate"
    summary = "Continue token ids. Routed experts are objects of `data`, `shape`, `dtype` and `start`."

    def _make_choice(self, part: CompletionDelta | CompletionOutput, logprobs: AnyLogprobs | None) -> GenerateChoice:
        choice = super()._make_choice(part, logprobs)
        if part.routed_experts is not None:
            choice.routed_experts = compact_routed_experts(part.routed_experts, part.routed_experts_start)
        return choice
