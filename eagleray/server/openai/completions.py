"""/v1/completions: texts or token ids, continued."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import SamplingParams
from eagleray.server.generation import Generation, GenerationGroup, GenerationTask
from eagleray.server.generation_route import GenerationRoute, ParsedRequest, has_content
from eagleray.server.logprobs import CompletionLogprobs, LogprobsCollector, Position, completion_logprobs, slices
from eagleray.server.openai.requests import CompletionRequest
from eagleray.server.openai.responses import CompletionChoice, CompletionResponse
from eagleray.server.routed_experts import routed_experts
from eagleray.server.service import Service

DEFAULT_MAX_TOKENS = 16

PROMPTS_AT_ONCE = 16
"""Number of short prompts that are tokenized before the event loop serves others."""

Parsed = ParsedRequest[CompletionRequest]


class CompletionRoute(GenerationRoute[CompletionRequest, CompletionResponse]):
    def __init__(self, service: Service) -> None:
        super().__init__(
            service,
            "/v1/completions",
            "Continue a text.",
            request_body=CompletionRequest,
            response=CompletionResponse,
            stream_event=CompletionResponse,
            logprobs=CompletionLogprobs,
        )

    def _make_task(self, body: CompletionRequest, request: Request) -> GenerationTask:
        self._service.check_store(body.store)
        self._service.check_tokenizer()
        parts = _parts(body)
        return self._task(
            body,
            request,
            num_prompts=len(parts),
            make_prompts=functools.partial(self._prompts, parts, body),
            params=self._params(body),
            only_prompt=body.max_tokens == 0,
        )

    async def _prompts(self, parts: Sequence[str | list[int]], body: CompletionRequest) -> list[Prompt]:
        prompts = []
        for part in parts:
            prompts.append(await self._prompt(part, body))
            if len(prompts) % PROMPTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return prompts

    async def _prompt(self, part: str | list[int], body: CompletionRequest) -> Prompt:
        if isinstance(part, list):
            return Prompt(token_ids=part)
        token_ids = await self._service.text.encode(part, add_special_tokens=body.add_special_tokens is not False)
        return Prompt(part, token_ids)

    def _params(self, body: CompletionRequest) -> SamplingParams:
        decided: dict[str, int | None] = {"logprobs": body.logprobs}
        if body.max_tokens is None:
            decided["max_tokens"] = DEFAULT_MAX_TOKENS
        if body.max_tokens == 0 and body.echo:
            decided["max_tokens"] = 1
        if body.echo and body.logprobs is not None:
            decided["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        return self._sampling_params(body, **decided)

    def _logprobs(self, parsed: Parsed, generation: Generation, delta: CompletionDelta) -> CompletionLogprobs:
        assert delta.logprobs is not None
        return self._format(parsed, generation, delta.index, delta.token_ids, delta.logprobs)

    async def _collect_logprobs(
        self,
        parsed: Parsed,
        generation: Generation,
        delta: CompletionDelta,
        collector: LogprobsCollector,
    ) -> None:
        if delta.index not in generation.text_offsets:
            generation.text_offsets[delta.index] = 0
            async for logprobs in self._echoed_logprobs(parsed, generation, delta.index):
                collector.add(logprobs)
        await super()._collect_logprobs(parsed, generation, delta, collector)

    async def _choice(
        self,
        parsed: Parsed,
        generation: Generation,
        output: CompletionOutput,
        logprobs: CompletionLogprobs | None,
    ) -> CompletionChoice:
        choice = self._make_choice(parsed, generation, output)
        await self._show_prompt(parsed, generation, choice)
        choice.logprobs = logprobs
        return choice

    async def _response(
        self, parsed: Parsed, group: GenerationGroup, choices: list[CompletionChoice]
    ) -> CompletionResponse:
        response = self._make_chunk(parsed, choices)
        response.usage = group.usage
        return response

    def _chunk(self, parsed: Parsed, generation: Generation, delta: CompletionDelta) -> CompletionResponse | None:
        if not has_content(delta, shows_token_ids=parsed.body.return_token_ids):
            return None
        choice = self._make_choice(parsed, generation, delta)
        if delta.logprobs is not None:
            choice.logprobs = self._logprobs(parsed, generation, delta)
        return self._make_chunk(parsed, [choice])

    async def _first_chunks(
        self, parsed: Parsed, generation: Generation, delta: CompletionDelta
    ) -> AsyncIterator[CompletionResponse]:
        """Yield several events for the log-probabilities of a long prompt, and otherwise one, even without a text."""
        choice = self._make_choice(parsed, generation, delta)
        await self._show_prompt(parsed, generation, choice)
        finish_reason, choice.finish_reason = choice.finish_reason, None
        stop_reason, choice.stop_reason = choice.stop_reason, None
        async for logprobs in self._echoed_logprobs(parsed, generation, delta.index):
            if choice.logprobs is not None:
                yield self._make_chunk(parsed, [choice])
                choice = CompletionChoice(index=choice.index, text="")
            choice.logprobs = logprobs
        if delta.logprobs is not None:
            logprobs = self._logprobs(parsed, generation, delta)
            choice.logprobs = logprobs if choice.logprobs is None else choice.logprobs.extended(logprobs)
        choice.finish_reason, choice.stop_reason = finish_reason, stop_reason
        yield self._make_chunk(parsed, [choice])

    def _make_chunk(self, parsed: Parsed, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(
            id=f"cmpl-{parsed.task.request_id}", created=parsed.created, model=self._model_name, choices=choices
        )

    def _make_choice(
        self,
        parsed: Parsed,
        generation: Generation,
        part: CompletionDelta | CompletionOutput,
    ) -> CompletionChoice:
        choice = CompletionChoice(
            index=generation.index * parsed.task.params.n + part.index,
            text=part.text,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )
        if parsed.body.return_token_ids:
            choice.token_ids = part.token_ids
        if part.routed_experts is not None:
            choice.routed_experts = routed_experts(part, parsed.body.routed_experts_format)
        return choice

    async def _show_prompt(self, parsed: Parsed, generation: Generation, choice: CompletionChoice) -> None:
        if parsed.body.echo:
            text = generation.prompt.text
            if text is None:
                text = self._service.tokenizer.decode(generation.prompt_token_ids, skip_special_tokens=False)
            choice.text = text + choice.text
        if parsed.body.return_token_ids:
            choice.prompt_token_ids = generation.prompt_token_ids
        choice.prompt_logprobs = await self._prompt_logprobs(parsed, generation, parsed.body.prompt_logprobs)

    async def _echoed_logprobs(
        self, parsed: Parsed, generation: Generation, index: int
    ) -> AsyncIterator[CompletionLogprobs]:
        """Yield the log-probabilities of the prompt in pieces, if the request asks for them and echoes the prompt."""
        positions, k = generation.prompt_logprobs, parsed.body.logprobs
        if not parsed.body.echo or k is None or positions is None:
            return
        for start, end in slices(len(positions), k):
            token_ids = generation.prompt_token_ids[start:end]
            yield self._format(parsed, generation, index, token_ids, positions[start:end])
            await asyncio.sleep(0)

    def _format(
        self,
        parsed: Parsed,
        generation: Generation,
        index: int,
        token_ids: Sequence[int],
        positions: Sequence[Position | None],
    ) -> CompletionLogprobs:
        offset, k = generation.text_offsets[index], parsed.body.logprobs or 0
        logprobs = completion_logprobs(token_ids, positions, k, offset, self._service.tokenizer)
        generation.text_offsets[index] += sum(map(len, logprobs.tokens))
        return logprobs


def _parts(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a request, each a text or token ids. Raises `InvalidRequest`."""
    parts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not parts:
        raise InvalidRequest("`prompt` is empty; give a text, or token ids", param="prompt")
    kinds = set(map(type, parts))  # quick even for a million of them
    if int not in kinds:
        prompts: list[str | list[int]] = parts  # type: ignore[assignment]
    elif kinds == {int}:
        prompts = [parts]  # type: ignore[list-item]
    else:
        raise InvalidRequest(
            "`prompt` mixes token ids with whole prompts; put the ids of each prompt into a list of their own",
            param="prompt",
        )
    if body.add_special_tokens and any(isinstance(prompt, list) for prompt in prompts):
        raise InvalidRequest(
            "`add_special_tokens` is for texts: token ids are taken as they are", param="add_special_tokens"
        )
    return prompts
