"""/v1/messages: the next message of a conversation in the form of Anthropic's API, and the count of its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams
from eagleray.server.anthropic.errors import ANTHROPIC_ERRORS, AnthropicErrorEvent, to_anthropic_error
from eagleray.server.anthropic.history import continues_last_message, template_messages
from eagleray.server.anthropic.request import (
    COUNT_FATES,
    MESSAGES_FATES,
    AnthropicRequest,
    CountTokensRequest,
    MessagesRequest,
)
from eagleray.server.anthropic.response import (
    AnthropicMessage,
    AnyMessageEvent,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    TextBlock,
    TextDelta,
    TokenCount,
    anthropic_usage,
)
from eagleray.server.body import Reasons
from eagleray.server.conversation_route import Conversation, ParsedConversation, TokenCountRoute, check_no_calls
from eagleray.server.error_responses import HttpError
from eagleray.server.field_fates import REASONING
from eagleray.server.generation import Generation, GenerationGroup, weight_versions
from eagleray.server.lenient_body import unsupported_feature
from eagleray.server.service import Service

FIELD_NAMES = {"prompt": "messages", "stop": "stop_sequences"}


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

    def _check_features(self, reasons: Reasons) -> None:
        super()._check_features(reasons)
        thinking = self.body.thinking
        if thinking is not None and thinking.type != "disabled":
            reasons.found.append(unsupported_feature(REASONING, ["thinking"]))

    def _check_tools(self) -> None:
        tools, choice = self.body.tools, self.body.tool_choice
        kind = None if choice is None else choice.get("type")
        check_no_calls(tools, kind, {"tools": tools, "tool_choice": choice})

    def _make_conversation(self) -> Conversation:
        return to_conversation(self.service, self.body)

    def _sampling_params(self) -> SamplingParams:
        return self._merge_answer(self.body.max_tokens, stop=self.body.stop_sequences)

    async def _choice(self, generation: Generation, output: CompletionOutput, logprobs: Any) -> CompletionOutput:
        return output

    async def _response(self, group: GenerationGroup, choices: list[CompletionOutput]) -> AnthropicMessage:
        (output,) = choices
        end, message = _end(output), self._message([TextBlock(text=output.text)])
        message.stop_reason, message.stop_sequence = end.stop_reason, end.stop_sequence
        message.weight_versions = end.weight_versions
        return message

    async def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[AnyMessageEvent]:
        yield MessageStart(self._message([]))
        yield ContentBlockStart(content_block=TextBlock(text=""))
        yield Ping()
        for event in self._chunks(generation, delta):
            yield event

    def _chunks(self, generation: Generation, delta: CompletionDelta) -> list[AnyMessageEvent]:
        return [] if self._is_empty(delta) else [self._chunk(generation, delta)]

    def _chunk(self, generation: Generation, delta: CompletionDelta) -> AnyMessageEvent:
        return ContentBlockDelta(delta=TextDelta(text=delta.text))

    async def _last_chunks(self, group: GenerationGroup) -> AsyncIterator[AnyMessageEvent]:
        (generation,) = group.generations
        yield ContentBlockStop()
        yield self._make_chunk((await generation.output()).outputs)
        yield MessageStop()

    def _make_chunk(self, choices: list[CompletionOutput]) -> AnyMessageEvent:
        return MessageDelta(delta=_end(choices[0]), usage=anthropic_usage(self._counted))

    def error_event(self, error: HttpError) -> AnthropicErrorEvent:
        return to_anthropic_error(error)

    def _message(self, content: list[TextBlock]) -> AnthropicMessage:
        usage = anthropic_usage(self._counted)
        return AnthropicMessage(id=self.id, model=self.model_name, content=content, usage=usage)


def _end(output: CompletionOutput) -> StopDelta:
    """Return why an answer ended."""
    end = StopDelta(stop_reason="end_turn", stop_sequence=None, weight_versions=weight_versions(output))
    if output.finish_reason is FinishReason.LENGTH:
        end.stop_reason = "max_tokens"
    elif output.finish_reason is FinishReason.ABORT:
        end.stop_reason = None
    elif isinstance(output.stop_reason, str):
        end.stop_reason, end.stop_sequence = "stop_sequence", output.stop_reason
    return end


def to_conversation(service: Service, body: AnthropicRequest) -> Conversation:
    """Return the conversation of a body. Raises `InvalidRequest` for messages that have no counterpart here."""
    service.text.check_num_messages(len(body.messages))
    effort = None if body.output_config is None else body.output_config.effort
    is_off = body.thinking is not None and body.thinking.type == "disabled"
    return Conversation(
        messages=template_messages(body.system, body.messages),
        tools=[_template_tool(tool) for tool in body.tools or ()],
        reasoning_effort="none" if is_off else effort,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=continues_last_message(body.messages),
    )


def _template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chat templates."""
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    return {"type": "function", "function": {names[name]: value for name, value in tool.items() if name in names}}


class CountTokensRoute(TokenCountRoute[CountTokensRequest]):
    path = "/v1/messages/count_tokens"
    summary = "The number of tokens of a prompt for /v1/messages."
    body_type = CountTokensRequest
    response_type = TokenCount
    error_form = ANTHROPIC_ERRORS
    fates = COUNT_FATES
    field_names = FIELD_NAMES

    def _make_conversation(self, body: CountTokensRequest) -> Conversation:
        return to_conversation(self._service, body)
