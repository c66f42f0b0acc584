"""/v1/completions/render and /v1/chat/completions/render: the prompts of a request, without generating.

An answer is a body of /inference/v1/generate, or a list of them. Holds no state of any request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from eagleray.client.field_checks import check_generates
from eagleray.client.preprocess import Prompt
from eagleray.messages.sampling import SamplingParams
from eagleray.server.body import field_names
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.fields import StreamOptions
from eagleray.server.generation_route import GenerationRoute, ParsedRequest
from eagleray.server.http_responses import json_response, unless_disconnected

DEFAULTS: Mapping[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(SamplingParams) if not field.required
}


class RenderedRequest(msgspec.Struct, kw_only=True):
    """A body of /inference/v1/generate that does what the rendered request would do, with token ids."""

    request_id: str
    model: str | None
    token_ids: list[int]
    token_offsets: list[tuple[int, int]] | None = None
    """Beginning and end of each token in the prompt's text, in characters; null for prompts of token ids."""
    sampling_params: dict[str, Any]
    """Without those that have their usual value."""
    stream: bool
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    features: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


class RenderRoute(GenerationRoute[Any, Any]):
    """The handler of one route that renders the requests of another. `is_list`: whether it answers with a list."""

    def __init__(self, *arguments: Any, is_list: bool) -> None:
        super().__init__(*arguments)
        self._is_list = is_list

    def endpoints(self) -> list[Endpoint]:
        render = Operation(
            self.render,
            f"The token ids and parameters of a request to {self._parsed_type.path}, for /inference/v1/generate.",
            request_body=self._parsed_type.body_type,
            fates=self._parsed_type.fates,
            response=list[RenderedRequest] if self._is_list else RenderedRequest,
            error_statuses=(400, 404, 413, 429, 500, 503, 504),
        )
        return [Endpoint(f"{self._parsed_type.path}/render", post=render)]

    async def render(self, request: Request) -> Response:
        body = await self._read(request)
        check_generates(self._service.engine_info)
        parsed = self._parsed_type(self._service, body, request)
        self._service.admission.check_count(parsed.task.num_prompts, parsed.task.params.n)
        rendered = await unless_disconnected(request.receive, self._render_all(parsed))
        return json_response(rendered if self._is_list else rendered[0])

    async def _render_all(self, parsed: ParsedRequest[Any, Any]) -> list[RenderedRequest]:
        with field_names(parsed.field_names):
            prompts = await parsed.make_prompts()
            return [await self._rendered(parsed, prompt, index, len(prompts)) for index, prompt in enumerate(prompts)]

    async def _rendered(
        self, parsed: ParsedRequest[Any, Any], prompt: Prompt, index: int, count: int
    ) -> RenderedRequest:
        body, params = parsed.body, parsed.task.params
        token_ids = self._service.client.tokenize(prompt)
        room = self._service.max_model_len - len(token_ids)
        given = {"max_tokens": room if params.max_tokens is None else min(params.max_tokens, room)}
        offsets = None
        if body.return_token_offsets and prompt.text is not None:
            offsets = await self._service.text.offsets(prompt.text, token_ids)
        return RenderedRequest(
            request_id=parsed.id if count == 1 else f"{parsed.id}-{index}",
            model=body.model,
            token_ids=token_ids,
            token_offsets=offsets,
            sampling_params=_changed(params) | given,
            stream=bool(body.stream),
            stream_options=body.stream_options if body.stream else None,
            cache_salt=body.cache_salt,
            priority=parsed.task.options["priority"],
        )


def _changed(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that do not have their usual value."""
    values = {name: getattr(params, name) for name in DEFAULTS}
    return {name: value for name, value in values.items() if value != DEFAULTS[name]}
