"""The route under chat, completions and generate: parse a body, run its task, respond as a whole or in events.

A `GenerationRoute` reads bodies; a `ParsedRequest`, which lives as long as its request, does the rest. Each API has a
subclass of `ParsedRequest` with its names of parameters and its forms of tokens.
"""

from __future__ import annotations

import abc
import functools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from eagleray.client.answers.plan import AnswerPlan
from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import SamplingParams, resolve_all_logprobs
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.server.access_log import USAGE
from eagleray.server.body import Reasons, RefusedBody, field_names
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.error_responses import ErrorForm, HttpError, InvalidFields
from eagleray.server.field_fates import Fate
from eagleray.server.fields import (
    SAMPLING_NAMES,
    OptionFields,
    StreamOptions,
    check_request_id,
    routing_headers,
)
from eagleray.server.generation import Generation, GenerationGroup, GenerationTask, PromptTokensDetails, Usage
from eagleray.server.http_responses import (
    MSGPACK,
    Emit,
    EventStream,
    accepts,
    json_response,
    msgpack_response,
    unless_disconnected,
)
from eagleray.server.load_header import FORMAT_HEADER, LOAD_HEADERS, load_header
from eagleray.server.logprobs import LogprobsCollector, PromptLogprobList, encoded_prompt_logprobs
from eagleray.server.service import Service
from eagleray.server.structured_outputs import ConstraintFields, constraint_names, constraint_of


class GenerationFields(OptionFields, Protocol):
    """The fields that the bodies of all generating routes have."""

    model: str | None
    stream: bool | None


Body = TypeVar("Body", bound=GenerationFields)
Chunk = TypeVar("Chunk")


class GenerationRoute(Generic[Body, Chunk]):
    """The handler of one route, whose requests are parsed and answered by `parsed_type`."""

    def __init__(self, service: Service, parsed_type: type[ParsedRequest[Body, Chunk]]) -> None:
        self._service = service
        self._parsed_type = parsed_type
        self._body = service.body_decoder(parsed_type.body_type, parsed_type.fates)

    def endpoints(self) -> list[Endpoint]:
        create = Operation(
            self.create,
            self._parsed_type.summary,
            request_body=self._parsed_type.body_type,
            fates=self._parsed_type.fates,
            response=self._parsed_type.response_type,
            gives_msgpack=self._parsed_type.gives_msgpack,
            stream_event=self._parsed_type.chunk_type if self._parsed_type.has_streams else None,
            has_named_events=self._parsed_type.has_named_events,
            headers=routing_headers() | LOAD_HEADERS,
            error_statuses=(400, 404, 413, 429, 500, 503, 504),
        )
        return [Endpoint(self._parsed_type.path, error_form=self._parsed_type.error_form, post=create)]

    async def create(self, request: Request) -> ASGIApp:
        body = await self._read(request)
        self._service.check_open()
        parsed = self._parsed_type(self._service, body, request)
        if body.stream:
            return EventStream(
                parsed.stream,
                parsed.task.request_id,
                error_event=parsed.error_event,
                is_named=parsed.has_named_events,
            )
        answer = await unless_disconnected(request.receive, parsed.respond())
        response = msgpack_response(answer) if parsed.is_msgpack else json_response(answer)
        if (wanted := request.headers.get(FORMAT_HEADER)) is not None:
            response.headers.update(load_header(wanted, self._service.client.stats.values()))
        return response

    async def _read(self, request: Request) -> Body:
        """Return the body. An error names the wrong parameters beside the fields that are refused."""
        try:
            return await self._body.read(request)
        except RefusedBody as refused:
            reasons = Reasons()
            reasons.found += refused.reasons
            if refused.rest is not None:
                with reasons.collecting():
                    self._parsed_type(self._service, refused.rest, request)
            raise InvalidFields(reasons.found) from None


class ParsedRequest(abc.ABC, Generic[Body, Chunk]):
    """A request that was understood: its task, and the form of its answer."""

    path: str
    summary: str
    body_type: type[Body]
    response_type: type[Any]
    chunk_type: Any
    """Type of the events of a stream: a struct, or a union of structs."""
    has_named_events = False
    """Whether each event carries its name, see `EventStream`."""
    error_form: ErrorForm | None = None
    """Form of errors; None: OpenAI's."""
    logprobs_type: type[msgspec.Struct]
    """Struct of the log-probabilities of a completion."""
    has_streams = True
    gives_msgpack = False
    """Whether a whole answer is msgpack if the request accepts that. Events are always JSON."""
    fates: Mapping[str, Fate] | None = None
    """Treatment of the fields that `body_type` does not have; None: they are refused."""
    field_names: Mapping[str, str] = {}
    """This API's names of fields that the client calls by others."""
    id_prefix = ""
    can_show_usage = True
    """Whether events have a place for the usage."""
    num_prompts = 1
    only_prompt = False
    """Whether the request asks for no token."""
    plan = AnswerPlan()
    """Form of the answers; by default they are undivided texts."""

    def __init__(self, service: Service, body: Body, request: Request) -> None:
        """Raise `InvalidRequest` for wrong parameters or headers, and for fields that could have no effect."""
        self.service = service
        self._state = request.scope["state"]
        self.body = body
        self.created = int(time.time())
        self.adapter = service.find_model(body.model)
        self.model_name = service.model_name if self.adapter is None else self.adapter.name
        self.usage: Usage | UnsetType | None = UNSET
        """Value of the answer's or the next event's field `usage`."""
        as_ids = getattr(body, "return_tokens_as_token_ids", None)
        self.names_tokens_by_id: bool = service.names_tokens_by_id if as_ids is None else as_ids
        """Whether log-probabilities name tokens by their ids in place of their texts."""
        self.streamed_details: PromptTokensDetails | None = None
        """Details of a stream's prompts so far."""
        # Answers to bodies without this field always show token ids.
        self.shows_token_ids = bool(getattr(body, "return_token_ids", True))
        self.is_msgpack = self.gives_msgpack and not body.stream and accepts(request.headers, MSGPACK)
        reasons = Reasons()
        self._check_features(reasons)
        if getattr(body, "stream_options", None) not in (None, StreamOptions()) and not body.stream:
            with reasons.collecting():
                raise InvalidRequest("`stream_options` is only for requests with `stream` true", param="stream_options")
        self._field_names = {**self.field_names, **self._constraint_names()}
        with reasons.collecting(), field_names(self._field_names):
            self.task = self._make_task(request)
        reasons.check()
        self.id = self.id_prefix + self.task.request_id
        """Id that answers show."""

    def _check_features(self, reasons: Reasons) -> None:
        """Collect what is wrong or not supported in fields that only this API has."""

    def _constraint_names(self) -> Mapping[str, str]:
        """Return the name of the field that constrains the answer, by the one that errors name, if `field_names` has
        not the right one."""
        return constraint_names(self.body)

    def _make_task(self, request: Request) -> GenerationTask:
        body, params = self.body, self._sampling_params()
        if -1 in (params.logprobs, params.prompt_logprobs):
            params = resolve_all_logprobs(params, self.service.vocab_size)
        if getattr(body, "routed_experts_format", None) is not None and not params.return_routed_experts:
            raise InvalidRequest(
                "`routed_experts_format` is for requests that ask for routed experts: add `return_routed_experts`, or "
                "drop it",
                param="routed_experts_format",
            )
        state = request.scope["state"]
        request_id = check_request_id(getattr(body, "request_id", None)) or state["request_id"]
        return GenerationTask(
            request_id=request_id,
            arrival=state["arrival"],
            num_prompts=self.num_prompts,
            params=params,
            options=self.service.request_options(body, request, request_id, self.adapter),
            only_prompt=self.only_prompt,
            field_names=self._field_names,
        )

    def _merge_sampling(self, **decided: Any) -> SamplingParams:
        """Return the values that the route `decided`, else those of the body, else the model's or OpenAI's defaults."""
        given = {name: value for name in SAMPLING_NAMES if (value := getattr(self.body, name, None)) is not None}
        if self.service.reports_routed_experts:
            given.setdefault("return_routed_experts", True)
        given |= self.plan.sampling_fields(self._content_constraint(), self.service.client.tokenizer)
        return make_sampling(self.service.default_sampling | given | decided)

    def _content_constraint(self) -> StructuredOutputsParams | None:
        """Return the constraint of the answer's content that the body asks for. Raises `InvalidRequest`."""
        return constraint_of(self.body) if isinstance(self.body, ConstraintFields) else None

    async def respond(self) -> Any:
        """Generate, and return the whole answer."""
        choices: list[Any] = []
        async with GenerationGroup(self.service, self.task, self.make_prompts) as group:
            self._state[USAGE] = group.usage
            await group.wait_until_ended()
            for generation in group.generations:
                choices += await self._choices(generation)
            self.usage = group.usage
            return await self._response(group, choices)

    async def _choices(self, generation: Generation) -> list[Any]:
        make_collector = functools.partial(LogprobsCollector, self.logprobs_type, is_msgpack=self.is_msgpack)
        collectors: defaultdict[int, LogprobsCollector] = defaultdict(make_collector)

        async def collect(delta: CompletionDelta) -> None:
            await self._collect_logprobs(generation, delta, collectors[delta.index])

        output = await generation.result(collect)
        has_logprobs = self.task.has_logprobs
        return [
            await self._choice(generation, part, collectors[part.index].result() if has_logprobs else None)
            for part in output.outputs
        ]

    async def _collect_logprobs(
        self, generation: Generation, delta: CompletionDelta, collector: LogprobsCollector
    ) -> None:
        if delta.logprobs is not None:
            collector.add(self._logprobs(generation, delta))

    async def stream(self, emit: Emit) -> None:
        """Generate, and emit the deltas as events while they come."""
        shows_usage, shows_usage_so_far = self._shown_usage()
        async with GenerationGroup(self.service, self.task, self.make_prompts) as group:
            self._state[USAGE] = group.usage
            self.streamed_details = group.prompt_details
            # As in OpenAI's API: null in the events before the one that shows the usage.
            self.usage = group.usage if shows_usage_so_far else None if shows_usage else UNSET
            async for generation, deltas in group.deltas():
                for delta in deltas:
                    if delta.index not in generation.text_offsets:
                        generation.text_offsets[delta.index] = 0
                        async for chunk in self._first_chunks(generation, delta):
                            await emit(chunk)
                    else:
                        for chunk in self._chunks(generation, delta):
                            await emit(chunk)
        self.usage = group.usage
        async for chunk in self._last_chunks(group):
            await emit(chunk)

    async def _last_chunks(self, group: GenerationGroup) -> AsyncIterator[Chunk]:
        """Yield the events after the last delta, when `usage` is final."""
        if self._shown_usage()[0]:
            yield self._make_chunk([])

    def error_event(self, error: HttpError) -> Any:
        """Return the event for an error after the first event, which ends the stream."""
        return error.reply

    def _shown_usage(self) -> tuple[bool, bool]:
        """Return whether the last event of a stream shows the usage, and whether all others do too."""
        if self.service.forces_usage and self.can_show_usage:
            return True, True
        options = getattr(self.body, "stream_options", None) or StreamOptions()
        return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)

    async def _prompt_logprobs(self, generation: Generation, k: int | None) -> PromptLogprobList | UnsetType:
        """Return the log-probabilities of the prompt for an answer; UNSET if `k`, the requested number, is None. -1
        stands for the whole vocabulary."""
        if k is None or generation.prompt_logprobs is None:
            return UNSET
        k = self.service.vocab_size if k == -1 else k
        return await encoded_prompt_logprobs(generation.prompt_logprobs, k, is_msgpack=self.is_msgpack)

    def _is_empty(self, delta: CompletionDelta) -> bool:
        """Whether a delta of an undivided answer, after the first, needs no event.

        Tokens may have no text yet, because a character is incomplete or a stop string may have begun.
        """
        return not (
            delta.text
            or delta.finish_reason is not None
            or delta.logprobs is not None
            or delta.routed_experts is not None
            or (self.shows_token_ids and delta.token_ids)
        )

    @abc.abstractmethod
    def _sampling_params(self) -> SamplingParams: ...

    @abc.abstractmethod
    async def make_prompts(self) -> list[Prompt]:
        """Tokenize the prompts. Called when the request has been admitted."""

    @abc.abstractmethod
    def _logprobs(self, generation: Generation, delta: CompletionDelta) -> Any:
        """Return the log-probabilities of a delta that has some, as a `logprobs_type`."""

    @abc.abstractmethod
    async def _choice(self, generation: Generation, output: CompletionOutput, logprobs: Any) -> Any:
        """Return a completion of a whole answer. `logprobs`: the collected ones, or None."""

    async def _response(self, group: GenerationGroup, choices: list[Any]) -> Any:
        """Return the whole answer."""
        return self._make_chunk(choices)

    @abc.abstractmethod
    def _chunks(self, generation: Generation, delta: CompletionDelta) -> Iterable[Chunk]:
        """Return the events for a delta after the first of its completion; none if it shows nothing."""

    @abc.abstractmethod
    def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[Chunk]:
        """Yield the events for the first delta of a completion, which also show the prompt if the user asks for it."""

    @abc.abstractmethod
    def _make_chunk(self, choices: list[Any]) -> Chunk:
        """Return an event with these choices; without any, the one that shows the usage."""


def make_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of these values. An error names every value that is wrong by itself."""
    reasons, rest = Reasons(), dict(values)
    while True:
        with reasons.collecting():
            params = SamplingParams(**rest)
            break
        wrong = reasons.found[-1].param
        if wrong not in rest:
            break
        del rest[wrong]
    reasons.check()
    return params
