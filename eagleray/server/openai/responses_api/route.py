"""/v1/responses: the next message of a conversation in the form that OpenAI's newer clients use, and the count of the
tokens of its prompt."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.errors import InvalidRequest, NotFound
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams
from eagleray.server.conversation_route import Conversation, ParsedConversation, TokenCountRoute, check_no_calls
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.error_responses import HttpError
from eagleray.server.generation import Generation, GenerationGroup, weight_versions
from eagleray.server.logprobs import ChatLogprobs, LogprobsCollector
from eagleray.server.openai.responses_api.input_items import continues_last_item, to_messages
from eagleray.server.openai.responses_api.request import (
    INPUT_TOKENS_FATES,
    RESPONSES_FATES,
    InputTokensRequest,
    ReasoningOptions,
    ResponsesInput,
    ResponsesRequest,
    TextOptions,
)
from eagleray.server.openai.responses_api.response import (
    AnyResponseEvent,
    ContentPartAdded,
    ContentPartDone,
    IncompleteReason,
    InputDetails,
    InputOutputUsage,
    InputTokenCount,
    OutputDetails,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseState,
)
from eagleray.server.service import Service

FIELD_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}

STATES: dict[FinishReason | None, ResponseState] = {
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}
"""Status of an answer by its end, where that is not `completed`."""


class ParsedResponse(ParsedConversation[ResponsesRequest, AnyResponseEvent]):
    path = "/v1/responses"
    summary = "Answer in a conversation, in the form of OpenAI's newer API. Answers are not kept."
    body_type = ResponsesRequest
    response_type = ResponseObject
    chunk_type = AnyResponseEvent
    fates = RESPONSES_FATES
    field_names = FIELD_NAMES
    id_prefix = "resp_"

    def _check_tools(self) -> None:
        body = self.body
        check_no_calls(body.tools, body.tool_choice, {"tools": body.tools, "tool_choice": body.tool_choice})

    def _make_conversation(self) -> Conversation:
        conversation = to_conversation(self.service, self.body)
        if self.body.truncation == "auto":
            conversation.truncate_prompt_tokens = self._num_kept_tokens()
        return conversation

    def _num_kept_tokens(self) -> int:
        """Return the number of prompt tokens that leaves room for the answer."""
        return max(1, self.service.max_model_len - (self.body.max_output_tokens or 1))

    def _sampling_params(self) -> SamplingParams:
        return self._merge_answer(self.body.max_output_tokens, logprobs=self._num_logprobs())

    def _num_logprobs(self) -> int | None:
        num_logprobs, most = self.body.top_logprobs or 0, self.service.max_logprobs
        if not 0 <= num_logprobs <= most:
            raise InvalidRequest(
                f"`top_logprobs` must be between 0 and {most}, but it is {num_logprobs}", param="top_logprobs"
            )
        return num_logprobs if self.body.has_logprobs else None

    async def _choice(self, generation: Generation, output: CompletionOutput, logprobs: Any) -> OutputMessage:
        self._state = STATES.get(output.finish_reason, "completed")
        text = OutputText(text=output.text)
        if logprobs is not None:
            text.logprobs = logprobs.content
        return OutputMessage(
            id=self._item_id,
            status="completed" if self._state == "completed" else "incomplete",
            content=[text],
            weight_versions=weight_versions(output),
        )

    async def _response(self, group: GenerationGroup, choices: list[OutputMessage]) -> ResponseObject:
        self._generation = group.generations[0]
        self._cached_tokens = group.prompt_details.cached_tokens
        return self._finished(choices[0])

    async def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[AnyResponseEvent]:
        self._generation = generation
        self._numbers = itertools.count()
        self._collector = LogprobsCollector(ChatLogprobs, is_msgpack=False)
        yield ResponseCreated(sequence_number=self._number(), response=self._object("in_progress"))
        yield ResponseInProgress(sequence_number=self._number(), response=self._object("in_progress"))
        item = OutputMessage(id=self._item_id, status="in_progress", content=[])
        yield OutputItemAdded(sequence_number=self._number(), item=item)
        yield ContentPartAdded(sequence_number=self._number(), item_id=self._item_id, part=OutputText(text=""))
        for event in self._chunks(generation, delta):
            yield event

    def _chunks(self, generation: Generation, delta: CompletionDelta) -> list[AnyResponseEvent]:
        return [] if self._is_empty(delta) else [self._chunk(generation, delta)]

    def _chunk(self, generation: Generation, delta: CompletionDelta) -> AnyResponseEvent:
        event = OutputTextDelta(sequence_number=self._number(), item_id=self._item_id, delta=delta.text)
        if delta.logprobs:
            logprobs = self._logprobs(generation, delta)
            self._collector.add(logprobs)
            event.logprobs = logprobs.content
        return event

    async def _last_chunks(self, group: GenerationGroup) -> AsyncIterator[AnyResponseEvent]:
        self._cached_tokens = group.prompt_details.cached_tokens
        (output,) = (await self._generation.output()).outputs
        item = await self._choice(
            self._generation, output, self._collector.result() if self.task.has_logprobs else None
        )
        (part,) = item.content
        name = self._item_id
        yield OutputTextDone(sequence_number=self._number(), item_id=name, text=part.text, logprobs=part.logprobs)
        yield ContentPartDone(sequence_number=self._number(), item_id=name, part=part)
        yield OutputItemDone(sequence_number=self._number(), item=item)
        yield self._make_chunk([item])

    def _make_chunk(self, choices: list[OutputMessage]) -> AnyResponseEvent:
        response = self._finished(choices[0])
        kind = ResponseCompleted if response.status == "completed" else ResponseIncomplete
        return kind(sequence_number=self._number(), response=response)

    def error_event(self, error: HttpError) -> ResponseFailed:
        response = self._object("failed")
        response.error = ResponseFailure(message=error.reply.error.message)
        return ResponseFailed(sequence_number=self._number(), response=response)

    def _number(self) -> int:
        return next(self._numbers)

    @property
    def _response_id(self) -> str:
        """Id of the answer. Clients of vLLM name a request as its answer is to be named."""
        name = self.task.request_id
        return name if name.startswith(self.id_prefix) else self.id

    @property
    def _item_id(self) -> str:
        return f"msg_{self.task.request_id}"

    def _finished(self, item: OutputMessage) -> ResponseObject:
        """Return the answer at its end."""
        response = self._object(self._state)
        response.output = [item]
        response.completed_at = int(time.time()) if self._state == "completed" else None
        response.incomplete_details = IncompleteReason("max_output_tokens") if self._state == "incomplete" else None
        usage = self._counted
        response.usage = InputOutputUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=self._cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(),
            total_tokens=usage.total_tokens,
        )
        return response

    def _object(self, status: ResponseState) -> ResponseObject:
        """Return an answer without output."""
        body, params = self.body, self.task.params
        reasoning, text = body.reasoning or ReasoningOptions(), body.text or TextOptions()
        room = self.service.max_model_len - len(self._generation.prompt_token_ids)
        return ResponseObject(
            id=self._response_id,
            created_at=self.created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=room if params.max_tokens is None else params.max_tokens,
            model=self.model_name,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
            temperature=params.temperature,
            text={"format": {"type": "text"}, "verbosity": text.verbosity or "medium"},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            user=body.user,
            metadata=body.metadata or {},
        )


def to_conversation(service: Service, body: ResponsesInput) -> Conversation:
    """Return the conversation of a body. Raises `InvalidRequest` for items that have no counterpart here."""
    service.text.check_num_messages(0 if isinstance(body.input, str) else len(body.input))
    return Conversation(
        messages=to_messages(body.instructions, body.input),
        tools=[_template_tool(tool) for tool in body.tools or ()],
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=continues_last_item(body.input),
    )


def _template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chat templates, which has the function in an object of its own."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


class InputTokensRoute(TokenCountRoute[InputTokensRequest]):
    path = "/v1/responses/input_tokens"
    summary = "The number of tokens of a prompt for /v1/responses."
    body_type = InputTokensRequest
    response_type = InputTokenCount
    fates = INPUT_TOKENS_FATES
    field_names = FIELD_NAMES

    def _make_conversation(self, body: InputTokensRequest) -> Conversation:
        return to_conversation(self._service, body)


def kept_response_endpoints() -> list[Endpoint]:
    """Return the endpoints that look for a kept answer, which does not exist."""

    async def refuse(request: Request) -> ASGIApp:
        raise NotFound(
            f"there is no response {request.path_params['response_id'][:80]!r}: this server does not keep answers "
            "(`store` has no effect). Read the answer of POST /v1/responses, and close its connection to cancel it"
        )

    def operation(summary: str) -> Operation:
        return Operation(refuse, f"{summary} Always 404, because answers are not kept.", error_statuses=(404,))

    path = "/v1/responses/{response_id:str}"
    return [
        Endpoint(path, get=operation("A kept answer."), delete=operation("Delete a kept answer.")),
        Endpoint(f"{path}/cancel", post=operation("Cancel an answer in the background.")),
        Endpoint(f"{path}/input_items", get=operation("The input of a kept answer.")),
    ]
