"""/tokenize and /detokenize: conversion between text and token ids, without an engine."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from eagleray.errors import InvalidRequest
from eagleray.server.chat_messages import Messages, check_template_fields, render_chat
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.field_fates import TOKENIZE_FATES
from eagleray.server.http_responses import json_response, unless_disconnected
from eagleray.server.service import Service


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Default: true for a text, false for a conversation.")
    ] = None
    return_token_strs: Annotated[bool | None, Meta(description="Also give the tokens as texts.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="For a conversation.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="For a conversation.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="For a conversation.")] = None
    chat_template: Annotated[str | None, Meta(description="For a conversation.")] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="For a conversation.")] = None
    documents: Annotated[list[dict[str, Any]] | None, Meta(description="For a conversation.")] = None
    reasoning_effort: Annotated[str | None, Meta(description="For a conversation.")] = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int | None
    """None before the first engine has joined."""
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[Annotated[int, Meta(extra_json_schema={"minimum": 0})]]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


CONVERSATION_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "chat_template",
    "tools",
    "documents",
    "reasoning_effort",
)


EITHER_FORM = {
    "oneOf": [
        {
            "properties": {"prompt": {"type": "string"}, **{name: {"type": "null"} for name in CONVERSATION_FIELDS}},
            "required": ["prompt"],
        },
        {"properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}, "required": ["messages"]},
    ]
}
"""Rule that a body has a text or a conversation, and fields of a conversation only with one."""


class TokenRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenize_body = service.body_decoder(TokenizeRequest, TOKENIZE_FATES)
        self._detokenize_body = service.body_decoder(DetokenizeRequest, {})

    def endpoints(self) -> list[Endpoint]:
        tokenize = Operation(
            self.tokenize,
            "The token ids of a text or a conversation.",
            request_body=TokenizeRequest,
            body_rules=EITHER_FORM,
            fates=TOKENIZE_FATES,
            response=TokenizeResponse,
            error_statuses=(400, 404, 413),
        )
        detokenize = Operation(
            self.detokenize,
            "The text of token ids.",
            request_body=DetokenizeRequest,
            fates={},
            response=DetokenizeResponse,
            error_statuses=(400, 404, 413),
        )
        return [Endpoint("/tokenize", post=tokenize), Endpoint("/detokenize", post=detokenize)]

    async def tokenize(self, request: Request) -> Response:
        body = await self._tokenize_body.read(request)
        self._service.find_model(body.model)
        tokens = await unless_disconnected(request.receive, self._encode(body))
        tokenizer, engine = self._service.tokenizer, self._service.client.engine_info
        answer = TokenizeResponse(
            count=len(tokens),
            max_model_len=engine.max_model_len if engine else None,
            tokens=tokens,
            token_strs=[tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None,
        )
        return json_response(answer)

    async def _encode(self, body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either `prompt` or `messages`", param="prompt")
        if body.messages is not None:
            check_template_fields(self._service, body)
            self._service.text.check_messages(body.messages)
            text = await render_chat(self._service, body.messages, body, body.tools)
            return await self._encode_text(text, add_special_tokens=bool(body.add_special_tokens))
        for name in CONVERSATION_FIELDS:
            if getattr(body, name) is not None:
                raise InvalidRequest(f"`{name}` is only for `messages`, not for a `prompt`", param=name)
        assert body.prompt is not None
        return await self._encode_text(body.prompt, add_special_tokens=body.add_special_tokens is not False)

    async def _encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        processor = self._service.text
        return await processor.encode(text, add_special_tokens=add_special_tokens, max_tokens=processor.utility_tokens)

    async def detokenize(self, request: Request) -> Response:
        body = await self._detokenize_body.read(request)
        self._service.find_model(body.model)
        self._service.text.check_decodable(len(body.tokens))
        self._check_known(body.tokens)
        return json_response(DetokenizeResponse(await self._service.text.decode(body.tokens)))

    def _check_known(self, token_ids: list[int]) -> None:
        engine, size = self._service.client.engine_info, self._service.tokenizer.vocab_size
        size = max(size, engine.vocab_size) if engine else size
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < size:
                raise InvalidRequest(
                    f"`tokens`: {token_id} is not a token id; they go from 0 to {size - 1}", param="tokens"
                )
