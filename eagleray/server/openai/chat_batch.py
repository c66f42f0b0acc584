"""/v1/chat/completions/batch: several conversations in one request, answered by one choice each."""

from __future__ import annotations

import asyncio

from eagleray.client.preprocess import Prompt
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import SamplingParams
from eagleray.server.body import Reasons
from eagleray.server.chat_messages import Conversations
from eagleray.server.generation import Generation, GenerationGroup
from eagleray.server.openai.chat import Conversation, ParsedChat
from eagleray.server.openai.requests import ChatRequest
from eagleray.server.openai.responses import ChatChoice, ChatResponse


class ChatBatchRequest(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """Answer in each of several conversations."""

    messages: Conversations  # type: ignore[assignment]


class ParsedChatBatch(ParsedChat):
    """A request whose fields hold for all of its conversations."""

    path = "/v1/chat/completions/batch"
    summary = "Answer in several conversations. `n` must be 1, and there are no streams."
    body_type: type[ChatRequest] = ChatBatchRequest
    body: ChatBatchRequest
    has_streams = False

    def _check_features(self, reasons: Reasons) -> None:
        super()._check_features(reasons)
        shown_of_one = ("return_prompt_text", "prompt_logprobs")
        given = [name for name in shown_of_one if not any(getattr(self.body, name) is off for off in (None, False))]
        refused = dict.fromkeys(given, "the answer has one place for it: ask for it in a request of one conversation")
        if self.body.n not in (None, 1):
            refused["n"] = "each conversation has one answer: leave it at 1"
        if self.body.stream:
            refused["stream"] = "this route has no streams: leave it out"
        for name, reason in refused.items():
            with reasons.collecting():
                raise InvalidRequest(f"`{name}`: {reason}", param=name)

    def _check_conversations(self) -> None:
        for index in range(len(self.body.messages)):
            try:
                self.service.text.check_messages(self._conversation(index))
            except InvalidRequest as error:
                error.args = (f"conversation {index}: {error}",)
                error.param = f"messages[{index}]{(error.param or '').removeprefix('messages')}"
                raise

    def _sampling_params(self) -> SamplingParams:
        self.num_prompts = len(self.body.messages)
        return super()._sampling_params()

    async def make_prompts(self) -> list[Prompt]:
        prompts = []
        for index in range(self.num_prompts):
            prompts.append(await self._render(self._conversation(index)))
            await asyncio.sleep(0)
        return prompts

    def _messages(self, generation: Generation) -> Conversation:
        return self._conversation(generation.index)

    def _conversation(self, index: int) -> Conversation:
        messages: Conversation = self.body.messages[index]
        return messages

    async def _response(self, group: GenerationGroup, choices: list[ChatChoice]) -> ChatResponse:
        response = await super()._response(group, choices)
        response.prompt_logprobs = response.prompt_token_ids = None
        return response
