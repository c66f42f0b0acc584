"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator

from msgspec import UNSET
from starlette.requests import Request

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import SamplingParams
from eagleray.server.body import field_names
from eagleray.server.chat_messages import render_chat
from eagleray.server.generation import Generation, GenerationGroup, GenerationTask
from eagleray.server.generation_route import GenerationRoute, ParsedRequest, has_content
from eagleray.server.logprobs import ChatLogprobs, chat_logprobs
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

FIELD_NAMES = {"prompt": "messages"}
"""This route's names of fields that the client calls by others."""

Parsed = ParsedRequest[ChatRequest]


class ChatRoute(GenerationRoute[ChatRequest, ChatChunk]):
    def __init__(self, service: Service) -> None:
        super().__init__(
            service,
            "/v1/chat/completions",
            "Answer in a conversation.",
            request_body=ChatRequest,
            response=ChatResponse,
            stream_event=ChatChunk,
            logprobs=ChatLogprobs,
        )

    def _make_task(self, body: ChatRequest, request: Request) -> GenerationTask:
        self._service.check_store(body.store)
        return self._task(
            body,
            request,
            make_prompts=functools.partial(self._prompts, body),
            params=self._params(body),
            field_names=FIELD_NAMES,
        )

    async def _prompts(self, body: ChatRequest) -> list[Prompt]:
        text = await render_chat(self._service, body.messages, body)
        return [Prompt(text, await self._service.text.encode(text, add_special_tokens=bool(body.add_special_tokens)))]

    def _params(self, body: ChatRequest) -> SamplingParams:
        max_tokens = _max_tokens(body)
        if max_tokens is None:  # as the model's defaults say, or else as long as the model's length allows
            max_tokens = self._service.default_sampling.get("max_tokens")
        with field_names({"max_tokens": "max_completion_tokens"} if body.max_tokens is None else {}):
            return self._sampling_params(body, logprobs=self._num_logprobs(body), max_tokens=max_tokens)

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

    def _logprobs(self, parsed: Parsed, generation: Generation, delta: CompletionDelta) -> ChatLogprobs:
        return chat_logprobs(delta, parsed.body.top_logprobs or 0, self._service.tokenizer)

    async def _choice(
        self,
        parsed: Parsed,
        generation: Generation,
        output: CompletionOutput,
        logprobs: ChatLogprobs | None,
    ) -> ChatChoice:
        return ChatChoice(
            index=output.index,
            message=ChatMessage(content=output.text),
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if parsed.body.return_token_ids else UNSET,
            routed_experts=routed_experts(output, parsed.body.routed_experts_format),
        )

    async def _response(self, parsed: Parsed, group: GenerationGroup, choices: list[ChatChoice]) -> ChatResponse:
        (generation,) = group.generations
        return ChatResponse(
            id=f"chatcmpl-{parsed.task.request_id}",
            created=parsed.created,
            model=self._model_name,
            choices=choices,
            usage=group.usage,
            prompt_logprobs=await self._prompt_logprobs(parsed, generation, parsed.body.prompt_logprobs),
            prompt_token_ids=generation.prompt_token_ids if parsed.body.return_token_ids else UNSET,
        )

    def _chunk(self, parsed: Parsed, generation: Generation, delta: CompletionDelta) -> ChatChunk | None:
        if not has_content(delta, shows_token_ids=parsed.body.return_token_ids):
            return None
        return self._make_chunk(parsed, [self._chunk_choice(parsed, generation, delta)])

    async def _first_chunks(
        self, parsed: Parsed, generation: Generation, delta: CompletionDelta
    ) -> AsyncIterator[ChatChunk]:
        choice = self._chunk_choice(parsed, generation, delta)
        choice.delta.role = "assistant"
        chunk = self._make_chunk(parsed, [choice])
        if len(generation.text_offsets) == 1:  # the first event of all
            chunk.prompt_logprobs = await self._prompt_logprobs(parsed, generation, parsed.body.prompt_logprobs)
            if parsed.body.return_token_ids:
                chunk.prompt_token_ids = generation.prompt_token_ids
        yield chunk

    def _make_chunk(self, parsed: Parsed, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{parsed.task.request_id}", created=parsed.created, model=self._model_name, choices=choices
        )

    def _chunk_choice(self, parsed: Parsed, generation: Generation, delta: CompletionDelta) -> ChatChunkChoice:
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if delta.logprobs is not None:
            choice.logprobs = self._logprobs(parsed, generation, delta)
        if parsed.body.return_token_ids:
            choice.token_ids = delta.token_ids
        if delta.routed_experts is not None:
            choice.routed_experts = routed_experts(delta, parsed.body.routed_experts_format)
        return choice


def _max_tokens(body: ChatRequest) -> int | None:
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) == 2:
        raise InvalidRequest(
            "`max_tokens` is the older name of `max_completion_tokens`: give one of them", param="max_completion_tokens"
        )
    return next(iter(limits), None)
