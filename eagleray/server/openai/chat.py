"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import SamplingParams
from eagleray.server.body import Reasons, field_names
from eagleray.server.chat_messages import (
    EFFORT_VARIABLES,
    check_no_calls,
    check_template_fields,
    message_text,
    render_chat,
)
from eagleray.server.field_fates import CHAT_FATES
from eagleray.server.generation import Generation, GenerationGroup, weight_versions
from eagleray.server.generation_route import ParsedRequest
from eagleray.server.logprobs import ChatLogprobs, chat_logprobs
from eagleray.server.openai.requests import ChatFields, ChatRequest
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

Conversation = list[dict[str, Any]]

Body = TypeVar("Body", bound=ChatFields)


class AnyParsedChat(ParsedRequest[Body, ChatChunk]):
    """A request to answer in one conversation or in several, with the same parameters."""

    response_type = ChatResponse
    chunk_type = ChatChunk
    logprobs_type = ChatLogprobs
    field_names = FIELD_NAMES
    fates = CHAT_FATES
    id_prefix = "chatcmpl-"
    _prompt_text: str | UnsetType = UNSET
    """The rendered prompt, if the answer shows it."""

    def __init__(self, service: Service, body: Body, request: Request) -> None:
        super().__init__(service, body, request)
        effort = body.reasoning_effort
        if effort not in (None, "none") and not service.tokenizer.template_uses(EFFORT_VARIABLES):
            service.report_ignored(request.scope["state"], "reasoning_effort")

    def _check_features(self, reasons: Reasons) -> None:
        body = self.body
        with reasons.collecting():
            _check_tools(body)
        with reasons.collecting():
            check_template_fields(self.service, body)
        with reasons.collecting():
            self._check_conversations()

    @property
    @abc.abstractmethod
    def _conversations(self) -> list[Conversation]:
        """The conversations, each with an answer of its own."""

    @abc.abstractmethod
    def _check_conversations(self) -> None:
        """Raise `InvalidRequest` for messages that no template could show."""

    def _sampling_params(self) -> SamplingParams:
        self.num_prompts = len(self._conversations)
        max_tokens = self._max_tokens()
        if max_tokens is None:  # the model's default, or else as many as the model's length allows
            max_tokens = self.service.default_sampling.get("max_tokens")
        with field_names({"max_tokens": "max_completion_tokens"} if self.body.max_tokens is None else {}):
            decided = {"logprobs": self._num_logprobs(), "max_tokens": max_tokens}
            if self.body.echo and self.body.prompt_logprobs is None:
                decided["prompt_logprobs"] = decided["logprobs"]
            return self._merge_sampling(**decided)

    def _max_tokens(self) -> int | None:
        limits = {limit for limit in (self.body.max_tokens, self.body.max_completion_tokens) if limit is not None}
        if len(limits) == 2:
            raise InvalidRequest(
                "`max_tokens` is the older name of `max_completion_tokens`: give one of them",
                param="max_completion_tokens",
            )
        return next(iter(limits), None)

    def _num_logprobs(self) -> int | None:
        num_logprobs, most = self.body.top_logprobs, self.service.max_logprobs
        if not num_logprobs:
            return 0 if self.body.logprobs else None
        if not self.body.logprobs:
            raise InvalidRequest("`top_logprobs` is only for requests with `logprobs` true", param="top_logprobs")
        num_asked = self.service.vocab_size if num_logprobs == -1 else num_logprobs
        if not 0 <= num_asked <= most:
            raise InvalidRequest(
                f"`top_logprobs` must be between 0 and {most} (the option `max_logprobs`), but it is {num_asked}",
                param="top_logprobs",
            )
        return num_logprobs

    async def make_prompts(self) -> list[Prompt]:
        prompts = []
        for messages in self._conversations:
            prompts.append(await self._render(messages))
            await asyncio.sleep(0)  # others are served between two conversations
        return prompts

    async def _render(self, messages: Conversation) -> Prompt:
        text = await render_chat(self.service, messages, self.body)
        if self.body.return_prompt_text:
            self._prompt_text = text
        add_special_tokens = bool(self.body.add_special_tokens)
        return await self.service.encode_prompt(text, self.body, add_special_tokens=add_special_tokens)

    def _echo(self, generation: Generation) -> str:
        """Return the beginning of an answer: the last message, if it has the answer's role and is to be shown again."""
        last = self._conversations[generation.index][-1]
        return message_text(last) if self.body.echo and last.get("role") == self._role(generation) else ""

    def _logprobs(self, generation: Generation, delta: CompletionDelta) -> ChatLogprobs:
        k = self.task.params.logprobs or 0
        return chat_logprobs(delta, k, self.service.tokenizer, as_ids=self.names_tokens_by_id)

    async def _choice(
        self, generation: Generation, output: CompletionOutput, logprobs: ChatLogprobs | None
    ) -> ChatChoice:
        experts = routed_experts(output, self.body.routed_experts_format)
        return ChatChoice(
            index=generation.index * self.task.params.n + output.index,
            message=ChatMessage(role=self._role(generation), content=self._echo(generation) + output.text),
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self.shows_token_ids else None,
            routed_experts=None if experts is UNSET else experts,
            weight_versions=weight_versions(output),
        )

    async def _response(self, group: GenerationGroup, choices: list[ChatChoice]) -> ChatResponse:
        generation = group.generations[0]
        prompt_logprobs = await self._prompt_logprobs(generation, self.task.params.prompt_logprobs)
        return ChatResponse(
            id=self.id,
            created=self.created,
            model=self.model_name,
            choices=choices,
            system_fingerprint=self.service.system_fingerprint,
            usage=group.usage,
            prompt_logprobs=None if prompt_logprobs is UNSET else prompt_logprobs,
            prompt_token_ids=generation.prompt_token_ids if self.shows_token_ids else None,
            prompt_text=None if self._prompt_text is UNSET else self._prompt_text,
        )

    def _chunk(self, generation: Generation, delta: CompletionDelta) -> ChatChunk:
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            weight_versions=weight_versions(delta),
        )
        if delta.logprobs is not None:
            choice.logprobs = self._logprobs(generation, delta)
        if self.shows_token_ids:
            choice.token_ids = delta.token_ids
        if delta.routed_experts is not None:
            choice.routed_experts = routed_experts(delta, self.body.routed_experts_format)
        return self._make_chunk([choice])

    async def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[ChatChunk]:
        chunk = self._chunk(generation, delta)
        first = chunk.choices[0].delta
        first.role, first.content = self._role(generation), self._echo(generation) + delta.text
        if len(generation.text_offsets) == 1:  # the first event of all
            chunk.prompt_logprobs = await self._prompt_logprobs(generation, self.task.params.prompt_logprobs)
            chunk.prompt_text = self._prompt_text
            chunk.prompt_token_ids = generation.prompt_token_ids if self.shows_token_ids else None
        yield chunk

    def _make_chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(id=self.id, created=self.created, model=self.model_name, choices=choices, usage=self.usage)
        if not choices or choices[0].finish_reason is not None:
            chunk.system_fingerprint = self.service.system_fingerprint
        return chunk

    def _role(self, generation: Generation) -> str:
        """Role of the answer: that of the last message, if the answer continues it."""
        body = self.body
        is_new = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
        return self.service.response_role if is_new else self._conversations[generation.index][-1]["role"]


class ParsedChat(AnyParsedChat[ChatRequest]):
    """A request to answer in one conversation."""

    path = "/v1/chat/completions"
    summary = "Answer in a conversation."
    body_type = ChatRequest

    @property
    def _conversations(self) -> list[Conversation]:
        return [self.body.messages]

    def _check_conversations(self) -> None:
        self.service.text.check_messages(self.body.messages)


def _check_tools(body: ChatFields) -> None:
    """Raise `UnsupportedParameter` if the answer may have to be a tool call."""
    given = {"tools": body.tools, "tool_choice": body.tool_choice, "parallel_tool_calls": body.parallel_tool_calls}
    check_no_calls(body.tools, body.tool_choice, given)
