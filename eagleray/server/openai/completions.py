"""/v1/completions: texts or token ids, continued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from msgspec import UNSET

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.messages.sampling import SamplingParams
from eagleray.server.field_fates import COMPLETION_FATES
from eagleray.server.fields import split_prompts
from eagleray.server.generation import Generation, GenerationGroup, weight_versions
from eagleray.server.generation_route import ParsedRequest
from eagleray.server.logprobs import CompletionLogprobs, LogprobsCollector, Position, completion_logprobs, slices
from eagleray.server.openai.requests import CompletionRequest
from eagleray.server.openai.responses import CompletionChoice, CompletionResponse
from eagleray.server.routed_experts import routed_experts

DEFAULT_MAX_TOKENS = 16

PROMPTS_AT_ONCE = 16
"""Number of short prompts that are tokenized before the event loop serves others."""


class ParsedCompletion(ParsedRequest[CompletionRequest, CompletionResponse]):
    path = "/v1/completions"
    summary = "Continue a text."
    body_type = CompletionRequest
    response_type = CompletionResponse
    chunk_type = CompletionResponse
    logprobs_type = CompletionLogprobs
    fates = COMPLETION_FATES
    id_prefix = "cmpl-"

    def _sampling_params(self) -> SamplingParams:
        body = self.body
        self._parts = split_prompts(body.prompt, "prompt")
        self.num_prompts = len(self._parts)
        self.only_prompt = body.max_tokens == 0
        decided: dict[str, int | None] = {"logprobs": body.logprobs}
        if self.service.client.tokenizer is None:
            self._check_only_ids()
            decided["detokenize"] = False
        if body.max_tokens is None:
            decided["max_tokens"] = DEFAULT_MAX_TOKENS
        if body.max_tokens == 0 and body.echo:
            decided["max_tokens"] = 1
        if body.echo and body.logprobs is not None:
            asked = (body.logprobs, body.prompt_logprobs or 0)
            decided["prompt_logprobs"] = -1 if -1 in asked else max(asked)
        return self._merge_sampling(**decided)

    def _check_only_ids(self) -> None:
        """Raise `InvalidRequest` if a part of the answer would be a text, and show token ids otherwise."""
        if self.body.echo or self.body.logprobs is not None or not all(isinstance(part, list) for part in self._parts):
            self.service.check_tokenizer()
        self.shows_token_ids = True

    async def make_prompts(self) -> list[Prompt]:
        prompts = []
        for part in self._parts:
            prompts.append(await self._prompt(part))
            if len(prompts) % PROMPTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return prompts

    async def _prompt(self, part: str | list[int]) -> Prompt:
        if isinstance(part, list):
            return Prompt(token_ids=self.service.limit_token_ids(part, self.body))
        add_special_tokens = self.body.add_special_tokens is not False
        return await self.service.encode_prompt(part, self.body, add_special_tokens=add_special_tokens)

    def _logprobs(self, generation: Generation, delta: CompletionDelta) -> CompletionLogprobs:
        return self._format(generation, delta.index, delta.token_ids, delta.logprobs or [])

    async def _collect_logprobs(
        self, generation: Generation, delta: CompletionDelta, collector: LogprobsCollector
    ) -> None:
        if delta.index not in generation.text_offsets:
            generation.text_offsets[delta.index] = 0
            async for logprobs in self._echoed_logprobs(generation, delta.index):
                collector.add(logprobs)
        await super()._collect_logprobs(generation, delta, collector)

    async def _choice(
        self, generation: Generation, output: CompletionOutput, logprobs: CompletionLogprobs | None
    ) -> CompletionChoice:
        choice = self._make_choice(generation, output)
        await self._show_prompt(generation, choice)
        choice.logprobs = logprobs
        if choice.prompt_logprobs is UNSET:
            choice.prompt_logprobs = None
        if choice.routed_experts is UNSET:
            choice.routed_experts = None
        return choice

    async def _response(self, group: GenerationGroup, choices: list[CompletionChoice]) -> CompletionResponse:
        response = self._make_chunk(choices)
        response.system_fingerprint = self.service.system_fingerprint
        response.service_tier = response.kv_transfer_params = response.ec_transfer_params = response.metrics = None
        return response

    def _chunks(self, generation: Generation, delta: CompletionDelta) -> list[CompletionResponse]:
        return [] if self._is_empty(delta) else [self._chunk(generation, delta)]

    def _chunk(self, generation: Generation, delta: CompletionDelta) -> CompletionResponse:
        choice = self._make_choice(generation, delta)
        if delta.logprobs is not None:
            choice.logprobs = self._logprobs(generation, delta)
        return self._make_chunk([choice])

    async def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[CompletionResponse]:
        """Yield several events for the log-probabilities of a long prompt, and otherwise one, even without a text."""
        choice = self._make_choice(generation, delta)
        await self._show_prompt(generation, choice)
        choice.finish_reason = choice.stop_reason = None
        async for logprobs in self._echoed_logprobs(generation, delta.index):
            if choice.logprobs is not None:
                yield self._make_chunk([choice])
                choice = CompletionChoice(index=choice.index, text="")
            choice.logprobs = logprobs
        if delta.logprobs is not None:
            logprobs = self._logprobs(generation, delta)
            choice.logprobs = logprobs if choice.logprobs is None else choice.logprobs.extended(logprobs)
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        yield self._make_chunk([choice])

    def _make_chunk(self, choices: list[CompletionChoice]) -> CompletionResponse:
        chunk = CompletionResponse(
            id=self.id, created=self.created, model=self.model_name, choices=choices, usage=self.usage
        )
        if not choices or choices[0].finish_reason is not None:
            chunk.system_fingerprint = self.service.system_fingerprint
        return chunk

    def _make_choice(self, generation: Generation, part: CompletionDelta | CompletionOutput) -> CompletionChoice:
        choice = CompletionChoice(
            index=generation.index * self.task.params.n + part.index,
            text=part.text,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )
        if self.shows_token_ids:
            choice.token_ids = part.token_ids
        choice.weight_versions = weight_versions(part)
        if part.routed_experts is not None:
            choice.routed_experts = routed_experts(part, self.body.routed_experts_format)
        return choice

    async def _show_prompt(self, generation: Generation, choice: CompletionChoice) -> None:
        prompt_token_ids = generation.prompt_token_ids
        if self.body.echo:
            text = generation.prompt.text
            if text is None:
                text = self.service.tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
            choice.text = text + choice.text
        if self.shows_token_ids:
            choice.prompt_token_ids = prompt_token_ids
        choice.prompt_logprobs = await self._prompt_logprobs(generation, self.body.prompt_logprobs)

    async def _echoed_logprobs(self, generation: Generation, index: int) -> AsyncIterator[CompletionLogprobs]:
        """Yield the log-probabilities of the prompt in pieces, if the request asks for them and echoes the prompt."""
        positions, k = generation.prompt_logprobs, self.task.params.logprobs
        if not self.body.echo or k is None or positions is None:
            return
        for start, end in slices(len(positions), k):
            yield self._format(generation, index, generation.prompt_token_ids[start:end], positions[start:end])
            await asyncio.sleep(0)

    def _format(
        self, generation: Generation, index: int, token_ids: Sequence[int], positions: Sequence[Position | None]
    ) -> CompletionLogprobs:
        offset, k = generation.text_offsets[index], self.task.params.logprobs or 0
        tokenizer = self.service.tokenizer
        logprobs = completion_logprobs(token_ids, positions, k, offset, tokenizer, as_ids=self.names_tokens_by_id)
        generation.text_offsets[index] += sum(len(tokenizer.token_to_text(token_id)) for token_id in token_ids)
        return logprobs
