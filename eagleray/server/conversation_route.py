"""The part that routes of agents' clients share: one answer to a conversation that has the form of another API, and
the count of the tokens of its prompt.

The conversation is brought into the form of chat templates; from there on it is treated as by /v1/chat/completions.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from eagleray.client.answers.requested_tools import RequestedTools
from eagleray.client.outputs import CompletionDelta
from eagleray.client.preprocess import Prompt
from eagleray.client.text.tokenizer import TruncationSide
from eagleray.messages.sampling import SamplingParams
from eagleray.server.answers import AnswerReader
from eagleray.server.body import Reasons, field_names
from eagleray.server.chat_messages import check_template_fields, render_chat
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.error_responses import ErrorForm
from eagleray.server.field_fates import Fate
from eagleray.server.generation import Generation, Usage
from eagleray.server.generation_route import GenerationFields, ParsedRequest
from eagleray.server.http_responses import json_response, unless_disconnected
from eagleray.server.logprobs import ChatLogprobs, chat_logprobs
from eagleray.server.service import Service


class CountFields(Protocol):
    """The field that the bodies of all routes that count tokens have."""

    model: str | None


Body = TypeVar("Body", bound=GenerationFields)
CountBody = TypeVar("CountBody", bound=CountFields)
Chunk = TypeVar("Chunk")


@dataclass(kw_only=True)
class Conversation:
    """Messages in the form of chat templates, with the fields that determine how they become a prompt."""

    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None

    def check(self, service: Service) -> None:
        """Raise `InvalidRequest` for messages or template variables that a request may not have."""
        check_template_fields(service, self)
        service.text.check_messages(self.messages)

    async def render(self, service: Service) -> str:
        """Return the prompt. Raises `InvalidRequest`."""
        return await render_chat(service, self.messages, self, self.tools)


class ParsedConversation(ParsedRequest[Body, Chunk]):
    """A request for one answer."""

    logprobs_type = ChatLogprobs
    has_named_events = True

    def __init__(self, service: Service, body: Body, request: Request) -> None:
        super().__init__(service, body, request)
        self._reader = AnswerReader(self.plan, shows_reasoning=self._shows_reasoning)

    @property
    def _shows_reasoning(self) -> bool:
        """Whether the answer has its reasoning, if that is divided from the rest."""
        return True

    @property
    def _counted(self) -> Usage:
        """Tokens so far."""
        assert isinstance(self.usage, Usage)
        return self.usage

    @abc.abstractmethod
    def _make_conversation(self) -> Conversation:
        """Raise `InvalidRequest` for messages that have no counterpart here."""

    @abc.abstractmethod
    def _requested_tools(self) -> RequestedTools:
        """Return the tools of the body. Raises `InvalidRequest`."""

    def _check_features(self, reasons: Reasons) -> None:
        with reasons.collecting():
            self.plan = self.service.plan_answers(self._requested_tools())
        with reasons.collecting(), field_names(self.field_names):
            self._conversation = self._make_conversation()
            self._conversation.check(self.service)

    def _merge_answer(self, max_tokens: int | None, **decided: Any) -> SamplingParams:
        """Return the parameters of the answer, see `_merge_sampling`. `max_tokens`: by default the number in the
        model's defaults, or else all that the model's length leaves."""
        if max_tokens is None:
            max_tokens = self.service.default_sampling.get("max_tokens")
        # routed experts have no place in these answers
        return self._merge_sampling(max_tokens=max_tokens, return_routed_experts=False, **decided)

    async def make_prompts(self) -> list[Prompt]:
        text = await self._conversation.render(self.service)
        self._reader.prompts.append(text)
        return [await self.service.encode_prompt(text, self._conversation, add_special_tokens=False)]

    def _logprobs(self, generation: Generation, delta: CompletionDelta) -> ChatLogprobs:
        k = self.task.params.logprobs or 0
        return chat_logprobs(delta, k, self.service.tokenizer, as_ids=self.names_tokens_by_id)

    def _shown_usage(self) -> tuple[bool, bool]:
        return True, True


class TokenCountRoute(abc.ABC, Generic[CountBody]):
    """The handler of a route that counts the tokens of a prompt, which needs no engine."""

    path: str
    summary: str
    body_type: type[CountBody]
    response_type: type[Any]
    """Struct with the field `input_tokens`."""
    fates: Mapping[str, Fate]
    """Treatment of the fields that `body_type` does not have."""
    field_names: Mapping[str, str]
    """This API's names of fields that the client calls by others."""
    error_form: ErrorForm | None = None
    """Form of errors; None: OpenAI's."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._body = service.body_decoder(self.body_type, self.fates)

    def endpoints(self) -> list[Endpoint]:
        count = Operation(
            self.count,
            self.summary,
            request_body=self.body_type,
            fates=self.fates,
            response=self.response_type,
            error_statuses=(400, 404, 413),
        )
        return [Endpoint(self.path, error_form=self.error_form, post=count)]

    async def count(self, request: Request) -> Response:
        body = await self._body.read(request)
        self._service.find_model(body.model)
        with field_names(self.field_names):
            conversation = self._make_conversation(body)
            conversation.check(self._service)
            num_tokens = await unless_disconnected(request.receive, self._count(conversation))
        return json_response(self.response_type(input_tokens=num_tokens))

    @abc.abstractmethod
    def _make_conversation(self, body: CountBody) -> Conversation:
        """Raise `InvalidRequest` for messages that have no counterpart here."""

    async def _count(self, conversation: Conversation) -> int:
        text, processor = await conversation.render(self._service), self._service.text
        return len(await processor.encode(text, add_special_tokens=False, max_tokens=processor.utility_tokens))
