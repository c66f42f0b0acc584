"""The route under chat, completions and generate: parse a body, run its task, respond as a whole or in events.

A subclass says how its API names parameters and shows tokens. Holds no state of any request.
"""

from __future__ import annotations

import abc
import functools
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import SamplingParams
from eagleray.server.body import BodyDecoder
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.fields import SAMPLING_NAMES, SamplingFields, StreamOptions
from eagleray.server.generation import Generation, GenerationGroup, GenerationTask, Usage
from eagleray.server.http_responses import (
    MSGPACK,
    Emit,
    EventStream,
    accepts,
    json_response,
    msgpack_response,
    unless_disconnected,
)
from eagleray.server.logprobs import LogprobsCollector, PromptLogprobList, encoded_prompt_logprobs
from eagleray.server.routed_experts import RoutedExpertsFormat
from eagleray.server.service import Service

RANK = "X-data-parallel-rank"
SESSION = "X-Session-ID"
ROUTING_HEADERS = {
    RANK: "Rank of the engine that the request must go to.",
    SESSION: "Name of a session, up to 256 visible ASCII characters. Its requests go to the same engine.",
}
NUMBER = re.compile(r"[0-9]{1,9}")
SESSION_NAME = re.compile(r"[\x21-\x7e]{1,256}")


class GenerationFields(Protocol):
    """The fields that the bodies of all generating routes have."""

    model: str | None
    stream: bool | None
    stream_options: StreamOptions | None
    priority: int | None
    cache_salt: str | None
    timeout: float | None
    routed_experts_format: RoutedExpertsFormat | None


class StreamEvent(Protocol):
    """The field that the events of all generating routes have."""

    usage: Usage | UnsetType | None


Body = TypeVar("Body", bound=GenerationFields)
Chunk = TypeVar("Chunk", bound=StreamEvent)


class ParsedRequest(NamedTuple, Generic[Body]):
    """A request that was understood."""

    body: Body
    task: GenerationTask
    options: StreamOptions
    created: int
    """Unix time of the request, which answers show."""
    is_msgpack: bool
    """Whether the answer is encoded as msgpack, otherwise as JSON. Events are always JSON."""


class GenerationRoute(abc.ABC, Generic[Body, Chunk]):
    """The handler of a route whose requests are a `Body` and whose streams consist of `Chunk`s."""

    def __init__(
        self,
        service: Service,
        path: str,
        summary: str,
        *,
        request_body: type[Body],
        response: type[msgspec.Struct],
        stream_event: type[Chunk],
        logprobs: type[msgspec.Struct],
        gives_msgpack: bool = False,
    ) -> None:
        self._service = service
        self._model_name = service.model_name
        self._body = BodyDecoder(request_body, service.body_limits)
        self._logprobs_type = logprobs
        self._path = path
        self._operation = Operation(
            self.create,
            summary,
            request_body=request_body,
            response=response,
            gives_msgpack=gives_msgpack,
            stream_event=stream_event,
            headers=ROUTING_HEADERS,
            error_statuses=(400, 404, 413, 429, 500, 503, 504),
        )

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(self._path, post=self._operation)]

    async def create(self, request: Request) -> ASGIApp:
        parsed = await self._parse(request)
        if parsed.body.stream:
            return EventStream(functools.partial(self._stream, parsed), parsed.task.request_id)
        answer = await unless_disconnected(request.receive, self._whole(parsed))
        return msgpack_response(answer) if parsed.is_msgpack else json_response(answer)

    async def _parse(self, request: Request) -> ParsedRequest[Body]:
        body = await self._body.read(request)
        self._service.check_model(body.model)
        self._service.check_open()
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("`stream_options` is only for requests with `stream` true", param="stream_options")
        return ParsedRequest(
            body=body,
            task=self._make_task(body, request),
            options=body.stream_options or StreamOptions(),
            created=int(time.time()),
            is_msgpack=self._operation.gives_msgpack and not body.stream and accepts(request.headers, MSGPACK),
        )

    def _task(
        self,
        body: Body,
        request: Request,
        *,
        num_prompts: int = 1,
        make_prompts: Callable[[], Awaitable[Sequence[Prompt]]],
        params: SamplingParams,
        only_prompt: bool = False,
        field_names: Mapping[str, str] = {},
    ) -> GenerationTask:
        """Return the task of these prompts and parameters.

        Raises `InvalidRequest` for a wrong header, and for a priority or a format that could have no effect.
        """
        if body.routed_experts_format is not None and not params.return_routed_experts:
            raise InvalidRequest(
                "`routed_experts_format` is for requests that ask for routed experts: add `return_routed_experts`, or "
                "drop it",
                param="routed_experts_format",
            )
        state = request.scope["state"]
        return GenerationTask(
            request_id=state["request_id"],
            arrival=state["arrival"],
            num_prompts=num_prompts,
            make_prompts=make_prompts,
            params=params,
            priority=self._service.check_priority(body.priority),
            cache_salt=body.cache_salt or "",
            timeout=body.timeout,
            rank=_requested_rank(request.headers, self._service.ranks),
            session=_session_name(request.headers),
            only_prompt=only_prompt,
            field_names=field_names,
        )

    def _sampling_params(self, fields: SamplingFields, **decided: Any) -> SamplingParams:
        """Return the values that the route `decided`, else those of `fields`, else the model's or OpenAI's defaults."""
        given = {name: value for name in SAMPLING_NAMES if (value := getattr(fields, name)) is not None}
        return SamplingParams(**(self._service.default_sampling | given | decided))

    async def _whole(self, parsed: ParsedRequest[Body]) -> msgspec.Struct:
        choices: list[Any] = []
        async with GenerationGroup(self._service, parsed.task) as group:
            await group.wait_until_ended()
            for generation in group.generations:
                choices += await self._choices(parsed, generation)
            return await self._response(parsed, group, choices)

    async def _choices(self, parsed: ParsedRequest[Body], generation: Generation) -> list[Any]:
        make_collector = functools.partial(LogprobsCollector, self._logprobs_type, is_msgpack=parsed.is_msgpack)
        collectors: defaultdict[int, LogprobsCollector] = defaultdict(make_collector)

        async def collect(delta: CompletionDelta) -> None:
            await self._collect_logprobs(parsed, generation, delta, collectors[delta.index])

        output = await generation.result(collect)
        has_logprobs = parsed.task.has_logprobs
        return [
            await self._choice(parsed, generation, part, collectors[part.index].result() if has_logprobs else None)
            for part in output.outputs
        ]

    async def _collect_logprobs(
        self, parsed: ParsedRequest[Body], generation: Generation, delta: CompletionDelta, collector: LogprobsCollector
    ) -> None:
        if delta.logprobs is not None:
            collector.add(self._logprobs(parsed, generation, delta))

    async def _stream(self, parsed: ParsedRequest[Body], emit: Emit) -> None:
        options = parsed.options
        async with GenerationGroup(self._service, parsed.task) as group:
            # As in OpenAI's API: null in the events before the one that shows the usage.
            usage = group.usage if options.continuous_usage_stats else None if options.include_usage else UNSET
            async for generation, deltas in group.deltas():
                for delta in deltas:
                    if delta.index in generation.text_offsets:
                        chunk = self._chunk(parsed, generation, delta)
                        if chunk is not None:
                            chunk.usage = usage
                            await emit(chunk)
                        continue
                    generation.text_offsets[delta.index] = 0
                    async for chunk in self._first_chunks(parsed, generation, delta):
                        chunk.usage = usage
                        await emit(chunk)
        if options.include_usage:
            chunk = self._make_chunk(parsed, [])
            chunk.usage = group.usage
            await emit(chunk)

    async def _prompt_logprobs(
        self, parsed: ParsedRequest[Body], generation: Generation, k: int | None
    ) -> PromptLogprobList | UnsetType:
        """Return the log-probabilities of the prompt for an answer; UNSET if `k`, the number asked for, is None."""
        if k is None or generation.prompt_logprobs is None:
            return UNSET
        return await encoded_prompt_logprobs(generation.prompt_logprobs, k, is_msgpack=parsed.is_msgpack)

    @abc.abstractmethod
    def _make_task(self, body: Body, request: Request) -> GenerationTask:
        """Return the task of a request. Raises `InvalidRequest`."""

    @abc.abstractmethod
    def _logprobs(self, parsed: ParsedRequest[Body], generation: Generation, delta: CompletionDelta) -> Any:
        """Return the log-probabilities of a delta that has some, in the form of this API."""

    @abc.abstractmethod
    async def _choice(
        self, parsed: ParsedRequest[Body], generation: Generation, output: CompletionOutput, logprobs: Any
    ) -> Any:
        """Return a completion of a whole answer. `logprobs`: the collected ones, or None."""

    @abc.abstractmethod
    async def _response(
        self, parsed: ParsedRequest[Body], group: GenerationGroup, choices: list[Any]
    ) -> msgspec.Struct:
        """Return a whole answer."""

    @abc.abstractmethod
    def _chunk(self, parsed: ParsedRequest[Body], generation: Generation, delta: CompletionDelta) -> Chunk | None:
        """Return the event for a delta; None if there is nothing to show."""

    @abc.abstractmethod
    def _first_chunks(
        self, parsed: ParsedRequest[Body], generation: Generation, delta: CompletionDelta
    ) -> AsyncIterator[Chunk]:
        """Yield the events for the first delta of a completion, which also show the prompt if the user asks for it."""

    @abc.abstractmethod
    def _make_chunk(self, parsed: ParsedRequest[Body], choices: list[Any]) -> Chunk:
        """Return an event with these choices; without any, the last one, which shows the usage."""


def has_content(delta: CompletionDelta, *, shows_token_ids: bool | None) -> bool:
    """Whether a delta after the first is worth an event.

    Tokens may have no text yet, because a character is incomplete or a stop string may have begun.
    """
    return bool(
        delta.text
        or delta.finish_reason is not None
        or delta.logprobs is not None
        or delta.routed_experts is not None
        or (shows_token_ids and delta.token_ids)
    )


def _requested_rank(headers: Headers, ranks: range) -> int | None:
    """Return the rank, one of `ranks`, that the request must go to; None: any.

    Raises `InvalidRequest` for another rank, because a user who names an engine must not get a different one.
    """
    given = headers.get(RANK)
    if given is None:
        return None
    if not NUMBER.fullmatch(given) or int(given) not in ranks:
        several = f"engines of the ranks {ranks[0]} to {ranks[-1]}"
        here = several if len(ranks) > 1 else f"one engine, of rank {ranks[0]}"
        raise InvalidRequest(f"header {RANK}: there is no rank {given[:20]!r} here; this server has {here}", param=RANK)
    return int(given)


def _session_name(headers: Headers) -> str | None:
    """Return the name of the request's session, if it has one. Raises `InvalidRequest`."""
    given = headers.get(SESSION)
    if given is not None and not SESSION_NAME.fullmatch(given):
        raise InvalidRequest(f"header {SESSION} must be 1 to 256 visible ASCII characters", param=SESSION)
    return given
