"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from eagleray.client.answers.parts import AnswerPart, CallArguments, CallBegin, Content, Reasoning
from eagleray.client.answers.requested_tools import CHAT_TOOLS, choose_tools, read_tools
from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.errors import InvalidRequest
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams
from eagleray.server.answers import AnswerReader, check_reasoning_field
from eagleray.server.body import Reasons, field_names
from eagleray.server.chat_messages import EFFORT_VARIABLES, check_template_fields, message_text, render_chat
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
    ChatToolCall,
    FunctionDelta,
    ToolCallDelta,
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
        self._reader = AnswerReader(self.plan, shows_reasoning=body.include_reasoning is not False)
        self._callers: set[int] = set()
        """Numbers of the streamed choices that have calls."""
        effort = body.reasoning_effort
        if effort not in (None, "none") and not service.tokenizer.template_uses(EFFORT_VARIABLES):
            service.report_ignored(request.scope["state"], "reasoning_effort")

    def _check_features(self, reasons: Reasons) -> None:
        body = self.body
        with reasons.collecting():
            offered = read_tools(body.tools, CHAT_TOOLS)
            requested = choose_tools(offered, body.tool_choice, is_parallel=body.parallel_tool_calls)
            self.plan = self.service.plan_answers(requested)
        with reasons.collecting():
            check_reasoning_field(body.include_reasoning, self.plan)
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
        text = await render_chat(self.service, messages, self.body, self.plan.requested.offered.shown)
        self._reader.prompts.append(text)
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
        message = self._message(generation, output)
        return ChatChoice(
            index=self._choice_index(generation, output),
            message=message,
            logprobs=logprobs if self._shows_tokens else None,
            finish_reason=self._finish_reason(output, has_calls=message.tool_calls is not UNSET),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self.shows_token_ids and self._shows_tokens else None,
            routed_experts=None if experts is UNSET else experts,
            weight_versions=weight_versions(output),
        )

    def _choice_index(self, generation: Generation, part: CompletionDelta | CompletionOutput) -> int:
        return generation.index * self.task.params.n + part.index

    def _message(self, generation: Generation, output: CompletionOutput) -> ChatMessage:
        whole = self._delta(self._choice_index(generation, output), self._reader.read(generation, output))
        content = self._echo(generation) + (whole.content or "")
        message = ChatMessage(role=self._role(generation), content=content)
        if whole.reasoning:
            message.reasoning = message.reasoning_content = whole.reasoning
        if whole.tool_calls:
            message.tool_calls = msgspec.convert(whole.tool_calls, list[ChatToolCall], from_attributes=True)
        if whole.reasoning or whole.tool_calls:
            message.content = content or None
        return message

    @property
    def _shows_tokens(self) -> bool:
        """Whether tokens may be shown: as in vLLM, not where they would give away the reasoning."""
        return self.body.include_reasoning is not False or self.plan.reasoning is None

    def _finish_reason(self, part: CompletionDelta | CompletionOutput, *, has_calls: bool) -> str | None:
        """Return why a choice ended. As in vLLM and OpenAI's API, calls of a tool that the request names are no reason
        of their own."""
        is_named = self.plan.requested.choice.name is not None
        if has_calls and not is_named and part.finish_reason is FinishReason.STOP:
            return "tool_calls"
        return part.finish_reason

    async def _response(self, group: GenerationGroup, choices: list[ChatChoice]) -> ChatResponse:
        generation = group.generations[0]
        await self._reader.count_reasoning(group.usage, self.service.text)
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

    def _chunks(self, generation: Generation, delta: CompletionDelta) -> list[ChatChunk]:
        choice = self._chunk_choice(generation, delta)
        shown = choice.delta
        is_shown = (
            bool(shown.content or shown.reasoning or shown.tool_calls)
            or choice.finish_reason is not None
            or choice.logprobs is not None
            or choice.token_ids
            or choice.routed_experts is not UNSET
        )
        return [self._make_chunk([choice])] if is_shown else []

    def _chunk_choice(self, generation: Generation, delta: CompletionDelta) -> ChatChunkChoice:
        index = self._choice_index(generation, delta)
        shown = self._delta(index, self._reader.read(generation, delta))
        choice = ChatChunkChoice(
            index=index,
            delta=shown,
            finish_reason=self._finish_reason(delta, has_calls=index in self._callers),
            stop_reason=delta.stop_reason,
            weight_versions=weight_versions(delta),
        )
        if not self.plan.is_divided:
            shown.content = shown.content or ""
        if delta.logprobs is not None and self._shows_tokens:
            choice.logprobs = self._logprobs(generation, delta)
        if self.shows_token_ids and self._shows_tokens:
            choice.token_ids = delta.token_ids
        if delta.routed_experts is not None:
            choice.routed_experts = routed_experts(delta, self.body.routed_experts_format)
        return choice

    def _delta(self, index: int, parts: Iterable[AnswerPart]) -> ChatDelta:
        """Return the change of a choice's message, with one entry for each tool call."""
        delta = ChatDelta()
        calls: dict[int, ToolCallDelta] = {}
        for part in parts:
            match part:
                case Content(text):
                    delta.content = (delta.content or "") + text
                case Reasoning(text):
                    delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + text
                case CallBegin(number, name, call_id):
                    function = FunctionDelta(name=name, arguments="")
                    call_id = call_id or self.plan.make_call_id()
                    calls[number] = ToolCallDelta(index=number, id=call_id, type="function", function=function)
                case CallArguments(number, text):
                    call = calls.setdefault(number, ToolCallDelta(index=number, function=FunctionDelta(arguments="")))
                    call.function.arguments += text
        if calls:
            self._callers.add(index)
            delta.tool_calls = [*calls.values()]
        return delta

    async def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[ChatChunk]:
        choice = self._chunk_choice(generation, delta)
        choice.delta.role = self._role(generation)
        choice.delta.content = self._echo(generation) + (choice.delta.content or "")
        chunk = self._make_chunk([choice])
        if len(generation.text_offsets) == 1:  # the first event of all
            chunk.prompt_logprobs = await self._prompt_logprobs(generation, self.task.params.prompt_logprobs)
            chunk.prompt_text = self._prompt_text
            chunk.prompt_token_ids = generation.prompt_token_ids if self.shows_token_ids else None
        yield chunk

    async def _last_chunks(self, group: GenerationGroup) -> AsyncIterator[ChatChunk]:
        if self._shown_usage()[0]:
            await self._reader.count_reasoning(group.usage, self.service.text)
        async for chunk in super()._last_chunks(group):
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
