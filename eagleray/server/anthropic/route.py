"""/v1/messages: the next message of a conversation in the form of Anthropic's API, and the count of its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from starlette.requests import Request

from eagleray.client.answers.requested_tools import (
    ANTHROPIC_TOOLS,
    OfferedTools,
    RequestedTools,
    choose_tool,
    choose_tools,
    read_tools,
)
from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.errors import InvalidRequest
from eagleray.messages.grammars import PARAM
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.server.anthropic.content_blocks import ContentBlocks
from eagleray.server.anthropic.errors import ANTHROPIC_ERRORS, AnthropicErrorEvent, to_anthropic_error
from eagleray.server.anthropic.history import continues_last_message, template_messages
from eagleray.server.anthropic.request import (
    COUNT_FATES,
    MESSAGES_FATES,
    AnthropicRequest,
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    ToolChoiceOptions,
)
from eagleray.server.anthropic.response import (
    AnthropicMessage,
    AnyMessageEvent,
    ContentBlock,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    TokenCount,
    anthropic_usage,
)
from eagleray.server.body import Reasons
from eagleray.server.conversation_route import Conversation, ParsedConversation, TokenCountRoute
from eagleray.server.error_responses import HttpError
from eagleray.server.field_fates import REASONING
from eagleray.server.generation import Generation, GenerationGroup, weight_versions
from eagleray.server.lenient_body import unsupported_feature
from eagleray.server.service import Service

FIELD_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    PARAM: "output_config.format",
}


class ParsedMessages(ParsedConversation[MessagesRequest, AnyMessageEvent]):
    path = "/v1/messages"
    summary = "Answer in a conversation, in the form of Anthropic's API."
    body_type = MessagesRequest
    response_type = AnthropicMessage
    chunk_type = AnyMessageEvent
    error_form = ANTHROPIC_ERRORS
    fates = MESSAGES_FATES
    field_names = FIELD_NAMES
    id_prefix = "msg_"

    def __init__(self, service: Service, body: MessagesRequest, request: Request) -> None:
        super().__init__(service, body, request)
        self._blocks = ContentBlocks(self.id, self.plan.make_call_id)

    def _check_features(self, reasons: Reasons) -> None:
        super()._check_features(reasons)
        thinking = self.body.thinking
        if thinking is not None and thinking.type != "disabled" and self.plan.reasoning is None:
            reasons.found.append(unsupported_feature(REASONING, ["thinking"]))

    def _requested_tools(self) -> RequestedTools:
        offered, choice = read_tools(self.body.tools, ANTHROPIC_TOOLS), self.body.tool_choice or ToolChoiceOptions()
        is_parallel = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            if choice.name is None:
                raise InvalidRequest(
                    "`tool_choice` of type tool needs the `name` of one of the `tools`", param="tool_choice.name"
                )
            return choose_tool(offered, choice.name, "tool_choice.name", is_parallel=is_parallel)
        return choose_tools(offered, "required" if choice.type == "any" else choice.type, is_parallel=is_parallel)

    def _make_conversation(self) -> Conversation:
        return to_conversation(self.service, self.body, self.plan.requested.offered)

    def _sampling_params(self) -> SamplingParams:
        budget = None if self.body.thinking is None else self.body.thinking.budget_tokens
        return self._merge_answer(self.body.max_tokens, stop=self.body.stop_sequences, thinking_token_budget=budget)

    @property
    def _format(self) -> OutputFormat | None:
        return None if self.body.output_config is None else self.body.output_config.format

    def _constraint_names(self) -> Mapping[str, str]:
        return super()._constraint_names() if self._format is None else {}

    def _content_constraint(self) -> StructuredOutputsParams | None:
        return None if self._format is None else StructuredOutputsParams(json=self._format.schema_)

    # A whole answer is made of the same parts as a stream.

    async def _choice(self, generation: Generation, output: CompletionOutput, logprobs: Any) -> CompletionOutput:
        list(self._blocks.push(self._reader.read(generation, output)))
        list(self._close_blocks())
        return output

    async def _response(self, group: GenerationGroup, choices: list[CompletionOutput]) -> AnthropicMessage:
        (output,) = choices
        end, message = self._end(output), self._message(self._blocks.blocks)
        message.stop_reason, message.stop_sequence = end.stop_reason, end.stop_sequence
        message.weight_versions = end.weight_versions
        return message

    async def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[AnyMessageEvent]:
        yield MessageStart(self._message([]))
        if not self.plan.is_divided:
            for event in self._blocks.open_text():
                yield event
        yield Ping()
        for event in self._chunks(generation, delta):
            yield event

    def _chunks(self, generation: Generation, delta: CompletionDelta) -> Iterator[AnyMessageEvent]:
        return self._blocks.push(self._reader.read(generation, delta))

    def _close_blocks(self) -> Iterator[AnyMessageEvent]:
        if not self.plan.is_divided:
            yield from self._blocks.open_text()  # also if there is no text
        yield from self._blocks.close()

    async def _last_chunks(self, group: GenerationGroup) -> AsyncIterator[AnyMessageEvent]:
        (generation,) = group.generations
        for event in self._close_blocks():
            yield event
        yield self._make_chunk((await generation.output()).outputs)
        yield MessageStop()

    def _make_chunk(self, choices: list[CompletionOutput]) -> AnyMessageEvent:
        return MessageDelta(delta=self._end(choices[0]), usage=anthropic_usage(self._counted))

    def error_event(self, error: HttpError) -> AnthropicErrorEvent:
        return to_anthropic_error(error)

    def _message(self, content: list[ContentBlock]) -> AnthropicMessage:
        usage = anthropic_usage(self._counted)
        return AnthropicMessage(id=self.id, model=self.model_name, content=content, usage=usage)

    def _end(self, output: CompletionOutput) -> StopDelta:
        """Return why an answer ended."""
        end = StopDelta(stop_reason="end_turn", stop_sequence=None, weight_versions=weight_versions(output))
        if output.finish_reason is FinishReason.LENGTH:
            end.stop_reason = "max_tokens"
        elif output.finish_reason is FinishReason.ABORT:
            end.stop_reason = None
        elif isinstance(output.stop_reason, str):
            end.stop_reason, end.stop_sequence = "stop_sequence", output.stop_reason
        elif self._blocks.has_calls:
            end.stop_reason = "tool_use"
        return end


def to_conversation(service: Service, body: AnthropicRequest, offered: OfferedTools) -> Conversation:
    """Return the conversation of a body. Raises `InvalidRequest` for messages that have no counterpart here."""
    service.text.check_num_messages(len(body.messages))
    effort = None if body.output_config is None else body.output_config.effort
    thinking = None if body.thinking is None else body.thinking.type
    variables = body.chat_template_kwargs
    if thinking not in (None, "disabled"):
        variables = {"enable_thinking": True, **(variables or {})}
    return Conversation(
        messages=template_messages(body.system, body.messages),
        tools=offered.shown,
        reasoning_effort="none" if thinking == "disabled" else effort,
        chat_template_kwargs=variables,
        continue_final_message=continues_last_message(body.messages),
    )


class CountTokensRoute(TokenCountRoute[CountTokensRequest]):
    path = "/v1/messages/count_tokens"
    summary = "The number of tokens of a prompt for /v1/messages."
    body_type = CountTokensRequest
    response_type = TokenCount
    error_form = ANTHROPIC_ERRORS
    fates = COUNT_FATES
    field_names = FIELD_NAMES

    def _make_conversation(self, body: CountTokensRequest) -> Conversation:
        return to_conversation(self._service, body, read_tools(body.tools, ANTHROPIC_TOOLS))
