"""/v1/chat/completions/batch: several conversations in one request, answered by one choice each."""

from __future__ import annotations

from eagleray.errors import InvalidRequest
from eagleray.server.body import Reasons
from eagleray.server.generation import GenerationGroup
from eagleray.server.openai.chat import AnyParsedChat, Conversation
from eagleray.server.openai.requests import ChatBatchRequest
from eagleray.server.openai.responses import ChatChoice, ChatResponse


class ParsedChatBatch(AnyParsedChat[ChatBatchRequest]):
    """A request whose fields hold for all of its conversations."""

    path = "/v1/chat/completions/batch"
    summary = "Answer in several conversations. `n` must be 1, and there are no streams."
    body_type = ChatBatchRequest
    has_streams = False

    @property
    def _conversations(self) -> list[Conversation]:
        return self.body.messages

    def _check_features(self, reasons: Reasons) -> None:
        super()._check_features(reasons)
        shown_of_one = ("return_prompt_text", "prompt_logprobs")
        given = [name for name in shown_of_one if not any(getattr(self.body, name) is off for off in (None, False))]
        refused = dict.fromkeys(given, "the answer has one place for it: ask for it in a request of one conversation")
        if self.body.n not in (None, 1):
            refused["n"] = "each conversation has one answer: leave it at 1"
        if self.body.stream:
            refused["stream"] = "this route has no streams: leave it out"
        reasons.found += [InvalidRequest(f"`{name}`: {reason}", param=name) for name, reason in refused.items()]

    def _check_conversations(self) -> None:
        for index, messages in enumerate(self.body.messages):
            try:
                self.service.text.check_messages(messages)
            except InvalidRequest as error:
                error.args = (f"conversation {index}: {error}",)
                error.param = f"messages[{index}]{(error.param or '').removeprefix('messages')}"
                raise

    async def _response(self, group: GenerationGroup, choices: list[ChatChoice]) -> ChatResponse:
        response = await super()._response(group, choices)
        response.prompt_logprobs = response.prompt_token_ids = None
        return response
