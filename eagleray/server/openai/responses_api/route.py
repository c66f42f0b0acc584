"""/v1/responses: the next message of a conversation in the form that OpenAI's newer clients use, and the count of the
tokens of its prompt."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from eagleray.client.answers.requested_tools import (
    RESPONSES_TOOLS,
    OfferedTools,
    RequestedTools,
    choose_tools,
    read_tools,
)
from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.errors import InvalidRequest, NotFound
from eagleray.messages.grammars import PARAM
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.server.answers import check_reasoning_field
from eagleray.server.body import Reasons
from eagleray.server.conversation_route import Conversation, ParsedConversation, TokenCountRoute
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.error_responses import HttpError
from eagleray.server.generation import Generation, GenerationGroup, weight_versions
from eagleray.server.logprobs import ChatTokenLogprob, LogprobsCollector
from eagleray.server.openai.responses_api.input_items import continues_last_item, to_messages
from eagleray.server.openai.responses_api.output_items import OutputItems
from eagleray.server.openai.responses_api.request import (
    INPUT_TOKENS_FATES,
    RESPONSES_FATES,
    InputTokensRequest,
    ReasoningOptions,
    ResponsesInput,
    ResponsesRequest,
    TextFormat,
    TextOptions,
    to_constraint,
)
from eagleray.server.openai.responses_api.response import (
    AnyResponseEvent,
    IncompleteReason,
    InputDetails,
    InputOutputUsage,
    InputTokenCount,
    OutputDetails,
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
    PARAM: "text.format",
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

    def __init__(self, service: Service, body: ResponsesRequest, request: Request) -> None:
        super().__init__(service, body, request)
        self._next_number = itertools.count().__next__
        """Returns the number of the next event."""
        self._items = OutputItems(self.task.request_id, self._next_number, self.plan.make_call_id)

    @property
    def _shows_reasoning(self) -> bool:
        return self.body.include_reasoning is not False

    def _check_features(self, reasons: Reasons) -> None:
        super()._check_features(reasons)
        with reasons.collecting():
            check_reasoning_field(self.body.include_reasoning, self.plan)

    def _requested_tools(self) -> RequestedTools:
        body = self.body
        offered = read_tools(body.tools, RESPONSES_TOOLS)
        return choose_tools(offered, body.tool_choice, is_parallel=body.parallel_tool_calls)

    def _make_conversation(self) -> Conversation:
        conversation = to_conversation(self.service, self.body, self.plan.requested.offered)
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

    def _constraint_names(self) -> Mapping[str, str]:
        form = None if self.body.text is None else self.body.text.format
        return super()._constraint_names() if form is None or form.type == "text" else {}

    def _content_constraint(self) -> StructuredOutputsParams | None:
        form = None if self.body.text is None else self.body.text.format
        constraints = [found for found in (to_constraint(form), self.body.structured_outputs) if found is not None]
        if len(constraints) > 1:
            raise InvalidRequest(
                "`text.format` and `structured_outputs` both constrain the answer: give one of them",
                param="text.format",
            )
        return next(iter(constraints), None)

    # A whole answer is made of the same parts as a stream.

    async def _collect_logprobs(
        self, generation: Generation, delta: CompletionDelta, collector: LogprobsCollector
    ) -> None:
        list(self._read(generation, delta))

    async def _choice(self, generation: Generation, output: CompletionOutput, logprobs: Any) -> None:
        if not self.task.has_logprobs:
            list(self._read(generation, output))
        list(self._finish_items(output))

    async def _response(self, group: GenerationGroup, choices: list[Any]) -> ResponseObject:
        self._generation = group.generations[0]
        return await self._finished(group)

    async def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[AnyResponseEvent]:
        self._generation = generation
        yield ResponseCreated(sequence_number=self._next_number(), response=self._object("in_progress"))
        yield ResponseInProgress(sequence_number=self._next_number(), response=self._object("in_progress"))
        if not self.plan.is_divided:
            for event in self._items.open_message():
                yield event
        for event in self._chunks(generation, delta):
            yield event

    def _chunks(self, generation: Generation, delta: CompletionDelta) -> Iterator[AnyResponseEvent]:
        return self._read(generation, delta)

    def _read(self, generation: Generation, part: CompletionDelta | CompletionOutput) -> Iterator[AnyResponseEvent]:
        """Yield the events for the text of a delta or a whole completion."""
        logprobs: list[ChatTokenLogprob] = []
        may_show = self._shows_reasoning or self.plan.reasoning is None  # otherwise they would give it away
        if isinstance(part, CompletionDelta) and part.logprobs and may_show:
            logprobs = self._logprobs(generation, part).content
        if self.plan.is_divided:
            yield from self._items.push(self._reader.read(generation, part), logprobs)
        else:
            yield from self._items.push_undivided(part.text, logprobs)

    def _finish_items(self, output: CompletionOutput) -> Iterator[AnyResponseEvent]:
        self._state = STATES.get(output.finish_reason, "completed")
        if not self.plan.is_divided:
            yield from self._items.open_message()  # also if there is no text
        is_whole = self._state == "completed"
        yield from self._items.finish("completed" if is_whole else "incomplete", weight_versions(output))

    async def _last_chunks(self, group: GenerationGroup) -> AsyncIterator[AnyResponseEvent]:
        (output,) = (await self._generation.output()).outputs
        for event in self._finish_items(output):
            yield event
        yield self._make_chunk([await self._finished(group)])

    def _make_chunk(self, choices: list[ResponseObject]) -> AnyResponseEvent:
        (response,) = choices
        kind = ResponseCompleted if response.status == "completed" else ResponseIncomplete
        return kind(sequence_number=self._next_number(), response=response)

    def error_event(self, error: HttpError) -> ResponseFailed:
        response = self._object("failed")
        response.error = ResponseFailure(message=error.reply.error.message)
        return ResponseFailed(sequence_number=self._next_number(), response=response)

    @property
    def _response_id(self) -> str:
        """Id of the answer. Clients of vLLM name a request as its answer is to be named."""
        name = self.task.request_id
        return name if name.startswith(self.id_prefix) else self.id

    async def _finished(self, group: GenerationGroup) -> ResponseObject:
        """Return the answer at its end."""
        await self._reader.count_reasoning(group.usage, self.service.text)
        response = self._object(self._state)
        response.output = self._items.items
        response.completed_at = int(time.time()) if self._state == "completed" else None
        response.incomplete_details = IncompleteReason("max_output_tokens") if self._state == "incomplete" else None
        usage = group.usage
        details = usage.completion_tokens_details
        response.usage = InputOutputUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=group.prompt_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=0 if details is None else details.reasoning_tokens),
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
            text={"format": text.format or TextFormat(type="text"), "verbosity": text.verbosity or "medium"},
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


def to_conversation(service: Service, body: ResponsesInput, offered: OfferedTools) -> Conversation:
    """Return the conversation of a body. Raises `InvalidRequest` for items that have no counterpart here."""
    service.text.check_num_messages(0 if isinstance(body.input, str) else len(body.input))
    return Conversation(
        messages=to_messages(body.instructions, body.input),
        tools=offered.shown,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=continues_last_item(body.input),
    )


class InputTokensRoute(TokenCountRoute[InputTokensRequest]):
    path = "/v1/responses/input_tokens"
    summary = "The number of tokens of a prompt for /v1/responses."
    body_type = InputTokensRequest
    response_type = InputTokenCount
    fates = INPUT_TOKENS_FATES
    field_names = FIELD_NAMES

    def _make_conversation(self, body: InputTokensRequest) -> Conversation:
        return to_conversation(self._service, body, read_tools(body.tools, RESPONSES_TOOLS))


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
