"""Requests of `LLM` and `AsyncLLM` to pooling models, with the names and parameters of vLLM's methods.

Driven by their methods, in the loop of the instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from eagleray.client.pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    PooledPrompt,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTask,
    ScoringOutput,
    check_pooling,
    check_scorer,
    cosine,
    finish_vector,
    match_pairs,
    pair_messages,
)
from eagleray.client.request import RequestStream
from eagleray.config.pooling_spec import PoolingSpec
from eagleray.errors import InvalidRequest
from eagleray.instance import LocalInstance
from eagleray.lora import LoraLike, LoraRequests
from eagleray.messages.membership import EngineInfo
from eagleray.progress import Progress
from eagleray.prompts import PromptLike, as_prompts, one_for_each
from eagleray.row_errors import naming_row

ParamsLike = PoolingParams | Sequence[PoolingParams] | None
Output = TypeVar("Output")


class PoolingCalls:
    """The requests of one instance."""

    def __init__(self, instance: LocalInstance, loras: LoraRequests) -> None:
        self._instance = instance
        self._loras = loras

    async def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: ParamsLike,
        task: PoolingTask | None,
        *,
        lora_request: LoraLike = None,
        use_tqdm: bool = False,
        request_id: str | None = None,
        priority: int = 0,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the vector of each prompt. `task` None: the kind that the model is served for."""
        given = as_prompts(prompts)
        all_params = one_for_each(PoolingParams() if params is None else params, len(given), "pooling_params")
        specs = [self._check(one, task or one.task) for one in all_params]
        pooled = await self._pool(given, lora_request, use_tqdm, request_id, priority)
        return [
            PoolingRequestOutput(
                request_id=name,
                outputs=PoolingOutput(finish_vector(one.vector, spec, own)),
                prompt_token_ids=one.prompt_token_ids,
                num_cached_tokens=one.num_cached_tokens,
            )
            for (name, one), spec, own in zip(pooled, specs, all_params, strict=True)
        ]

    async def embed(
        self, prompts: PromptLike | Sequence[PromptLike], params: ParamsLike, lora_request: LoraLike, use_tqdm: bool
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the embedding of each prompt."""
        found = await self.encode(prompts, params, "embed", lora_request=lora_request, use_tqdm=use_tqdm)
        return [_with_outputs(one, EmbeddingOutput(one.outputs.data.tolist())) for one in found]

    async def classify(
        self, prompts: PromptLike | Sequence[PromptLike], params: ParamsLike, lora_request: LoraLike, use_tqdm: bool
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of the classes of each prompt."""
        found = await self.encode(prompts, params, "classify", lora_request=lora_request, use_tqdm=use_tqdm)
        return [_with_outputs(one, ClassificationOutput(one.outputs.data.tolist())) for one in found]

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        params: PoolingParams | None,
        lora_request: LoraLike,
        use_tqdm: bool,
        chat_template: str | None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return the score of each pair of texts, see `LLM.score`."""
        first, second = _texts(data_1, "data_1"), _texts(data_2, "data_2")
        own = params or PoolingParams()
        spec = self._check(own, own.task)
        check_scorer(spec)
        pairs = match_pairs(len(first), len(second), ("data_1", "data_2"))
        if spec.kind == "classify":
            prompts = [self._pair_prompt(first[one], second[other], chat_template) for one, other in pairs]
            found = await self.encode(prompts, own, "classify", lora_request=lora_request, use_tqdm=use_tqdm)
            return [_with_outputs(one, ScoringOutput(float(one.outputs.data[0]))) for one in found]
        pooled = await self._pool([*first, *second], lora_request, use_tqdm, names_prompts=False)
        return [_compare(pooled[one], pooled[len(first) + other]) for one, other in pairs]

    def _check(self, params: PoolingParams, task: PoolingTask | None) -> PoolingSpec:
        info = self._info
        if task is None:
            task = "embed" if info.pooling is None else info.pooling.kind
        return check_pooling(params, info, task)

    @property
    def _info(self) -> EngineInfo:
        info = self._instance.client.engine_info
        assert info is not None, "an instance is used once it serves"
        return info

    def _pair_prompt(self, query: str, document: str, chat_template: str | None) -> str:
        if chat_template is None and self._instance.config.model.chat_template is None:
            return query + document
        return self._instance.tokenizer.apply_chat_template(
            pair_messages(query, document), add_generation_prompt=False, chat_template=chat_template
        )

    async def _pool(
        self,
        prompts: Sequence[PromptLike],
        lora_request: LoraLike,
        use_tqdm: bool,
        request_id: str | None = None,
        priority: int = 0,
        *,
        names_prompts: bool = True,
    ) -> list[tuple[str, PooledPrompt]]:
        """Return the ids and vectors of the prompts. No prompt keeps running if one is wrong or fails.

        `names_prompts`: whether the error of one among several has its index, which a caller of pairs did not give."""
        requests = one_for_each(lora_request, len(prompts), "lora_request")
        adapters = [await self._loras.find(request) for request in requests]
        named = partial(naming_row, is_one_of_several=names_prompts and len(prompts) > 1)
        streams: list[RequestStream] = []
        try:
            for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
                with named(index):
                    stream = self._instance.pool(prompt, request_id=request_id, priority=priority, adapter=adapter)
                streams.append(stream)
            with Progress("prompts", len(streams), is_shown=use_tqdm) as progress:

                async def finish(index: int, stream: RequestStream) -> tuple[str, PooledPrompt]:
                    with named(index):
                        pooled = await stream.pooled()
                    progress.add_tokens(len(pooled.prompt_token_ids), 0)
                    progress.finish()
                    return stream.request_id, pooled

                return await self._instance.guard(_gather(streams, finish))
        finally:
            for stream in streams:
                stream.abort()


async def _gather(
    streams: Sequence[RequestStream],
    finish: Callable[[int, RequestStream], Coroutine[Any, Any, tuple[str, PooledPrompt]]],
) -> list[tuple[str, PooledPrompt]]:
    return await asyncio.gather(*map(finish, range(len(streams)), streams))


def _texts(given: str | Sequence[str], name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"`{name}` must be a text or a list of texts", param=name)
    return texts


def _with_outputs(output: PoolingRequestOutput[Any], outputs: Output) -> PoolingRequestOutput[Output]:
    """Return the output with the vector in another form."""
    return PoolingRequestOutput(
        request_id=output.request_id,
        outputs=outputs,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def _compare(first: tuple[str, PooledPrompt], second: tuple[str, PooledPrompt]) -> PoolingRequestOutput[ScoringOutput]:
    """Return the score of a pair of texts that have embeddings of their own."""
    (name, one), (other_name, other) = first, second
    return PoolingRequestOutput(
        request_id=f"{name}_{other_name}",
        outputs=ScoringOutput(cosine(one.vector, other.vector)),
        prompt_token_ids=one.prompt_token_ids + other.prompt_token_ids,
        num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
    )
