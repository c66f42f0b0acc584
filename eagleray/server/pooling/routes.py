"""/v1/embeddings, /pooling, /classify, /score and /rerank. Every handler answers as a whole; none streams."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from eagleray.client.pooling import (
    PooledPrompt,
    PoolingParams,
    PoolingTask,
    check_pooling,
    check_scorer,
    cosine,
    finish_vector,
    match_pairs,
)
from eagleray.client.preprocess import Prompt
from eagleray.config.pooling_spec import PoolingSpec
from eagleray.errors import InvalidRequest
from eagleray.messages.arrays import Array
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.fields import check_request_id, routing_headers
from eagleray.server.http_responses import json_response, unless_disconnected
from eagleray.server.pooling import responses
from eagleray.server.pooling.group import PROMPTS_AT_ONCE, PoolingJob, pool_prompts
from eagleray.server.pooling.prompts import PlaceOf, PromptMaker, encode_pairs, encode_prompts
from eagleray.server.pooling.requests import (
    POOLING_FATES,
    ClassificationRequest,
    EmbeddingRequest,
    EncodingFields,
    PairFields,
    PoolingFields,
    PoolingRequest,
    PromptsFields,
    RerankRequest,
    ScoreRequest,
    ScoringTexts,
    texts_of,
)
from eagleray.server.pooling.responses import PoolingUsage
from eagleray.server.service import Service

LARGE_ANSWER_NUMBERS = 2**16
"""Numbers of an answer above which its memory is given back to the system."""

PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))

Body = TypeVar("Body", bound=PoolingFields)
List = TypeVar("List", bound=responses.PoolingList[Any])


class _Answer(msgspec.Struct):
    """The fields of an answer that do not depend on the route."""

    request_id: str
    created: int
    model: str

    def as_list(self, kind: type[List], id_prefix: str, data: list[Any], usage: PoolingUsage) -> List:
        return kind(id=f"{id_prefix}-{self.request_id}", created=self.created, model=self.model, data=data, usage=usage)


class PoolingRoutes:
    """`has_pair_template`: whether the server was given the template that joins pairs of texts."""

    def __init__(self, service: Service, *, has_pair_template: bool) -> None:
        self._service = service
        self._has_pair_template = has_pair_template

    def endpoints(self) -> list[Endpoint]:
        make = self._operation
        embed = make(self.embed, EmbeddingRequest, responses.EmbeddingResponse, "The embeddings of texts.")
        pool = make(self.pool, PoolingRequest, responses.PoolingResponse, "The vectors of texts.")
        classify = make(self.classify, ClassificationRequest, responses.ClassificationResponse, "Classes of texts.")
        score = make(self.score, ScoreRequest, responses.ScoreResponse, "Scores of pairs of texts.")
        rerank = make(self.rerank, RerankRequest, responses.RerankResponse, "Documents by relevance for a query.")
        operations = {
            "/v1/embeddings": embed,
            "/pooling": pool,
            "/classify": classify,
            **dict.fromkeys(("/score", "/v1/score"), score),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
        }
        return [Endpoint(path, post=operation) for path, operation in operations.items()]

    def _operation(
        self,
        handle: Callable[[Body, Request, _Answer], Coroutine[Any, Any, Any]],
        body_type: type[Body],
        response_type: type[Any],
        summary: str,
    ) -> Operation:
        decoder = self._service.body_decoder(body_type, POOLING_FATES)

        async def handler(request: Request) -> Response:
            body = await decoder.read(request)
            self._service.check_open()
            adapter = self._service.find_model(body.model)
            answer = _Answer(
                check_request_id(body.request_id) or request.scope["state"]["request_id"],
                int(time.time()),
                self._service.model_name if adapter is None else adapter.name,
            )
            return json_response(await unless_disconnected(request.receive, handle(body, request, answer)))

        return Operation(
            handler,
            summary,
            request_body=body_type,
            fates=POOLING_FATES,
            response=response_type,
            headers=routing_headers(),
            error_statuses=(400, 404, 413, 429, 500, 503, 504),
        )

    # Handlers.

    async def embed(self, body: EmbeddingRequest, request: Request, answer: _Answer) -> Any:
        vectors, usage = await self._pool_vectors(body, request, "embed")
        data = [responses.EmbeddingData(index=index, embedding=vector) for index, vector in enumerate(vectors)]
        return answer.as_list(responses.EmbeddingResponse, "embd", data, usage)

    async def pool(self, body: PoolingRequest, request: Request, answer: _Answer) -> Any:
        vectors, usage = await self._pool_vectors(body, request, body.task or self._served_task())
        data = [responses.PoolingData(index=index, data=vector) for index, vector in enumerate(vectors)]
        return answer.as_list(responses.PoolingResponse, "pool", data, usage)

    async def classify(self, body: ClassificationRequest, request: Request, answer: _Answer) -> Any:
        params = PoolingParams(use_activation=body.use_activation)
        pooled, spec = await self._pool_inputs(body, request, params, "classify")
        data = []
        for index, one in enumerate(pooled):
            probs = finish_vector(one.vector, spec, params)
            label = spec.labels[int(np.argmax(probs))]
            data.append(
                responses.ClassificationData(index=index, label=label, probs=probs.tolist(), num_classes=len(probs))
            )
        return answer.as_list(responses.ClassificationResponse, "classify", data, _usage(pooled))

    async def score(self, body: ScoreRequest, request: Request, answer: _Answer) -> Any:
        names, first, second = _pair_fields(body)
        texts = texts_of(first, names[0]), texts_of(second, names[1])
        scores, usage = await self._score_pairs(*texts, names, body, request)
        data = [responses.ScoreData(index=index, score=score) for index, score in enumerate(scores)]
        return answer.as_list(responses.ScoreResponse, "score", data, usage)

    async def rerank(self, body: RerankRequest, request: Request, answer: _Answer) -> Any:
        documents = texts_of(body.documents, "documents")
        names = ("query", "documents")
        scores, usage = await self._score_pairs(texts_of(body.query, "query"), documents, names, body, request)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        results = [responses.RerankResult(index=index, relevance_score=scores[index]) for index in order]
        if body.return_documents is not False:
            for result in results:
                result.document = responses.RankedDocument(text=documents[result.index])
        return responses.RerankResponse(
            id=f"rerank-{answer.request_id}",
            model=answer.model,
            usage=responses.RerankUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens),
            results=results,
        )

    # Parts of handlers.

    def _served_task(self) -> PoolingTask:
        """Return the model's task; for a model that generates, a task that `check_pooling` refuses."""
        served = self._service.engine_info.pooling
        return "embed" if served is None else served.kind

    async def _pool_inputs(
        self, body: PromptsFields, request: Request, params: PoolingParams, task: PoolingTask
    ) -> tuple[list[PooledPrompt], PoolingSpec]:
        spec = check_pooling(params, self._service.engine_info, task)
        prompts = PromptMaker(self._service, body)
        return await self._send(prompts.num_prompts, prompts.make, prompts.place, body, request), spec

    async def _pool_vectors(
        self, body: EncodingFields, request: Request, task: PoolingTask
    ) -> tuple[list[msgspec.Raw | str], PoolingUsage]:
        """Return the vector of each prompt as the request wants it written, and the usage."""
        params = PoolingParams(use_activation=body.use_activation, dimensions=body.dimensions)
        pooled, spec = await self._pool_inputs(body, request, params, task)
        encode: Callable[[Array], msgspec.Raw | str] = responses.encode_as_json
        if body.encoding_format == "base64":
            encode = functools.partial(
                responses.encode_as_base64, dtype_name=body.embed_dtype, endianness=body.endianness
            )
        encoded = []
        for index, one in enumerate(pooled, 1):
            encoded.append(encode(finish_vector(one.vector, spec, params)))
            if index % PROMPTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        if sum(len(one.vector) for one in pooled) > LARGE_ANSWER_NUMBERS:
            self._service.memory_return.schedule()
        return encoded, _usage(pooled)

    async def _score_pairs(
        self, first: list[str], second: list[str], names: tuple[str, str], body: PairFields, request: Request
    ) -> tuple[list[float], PoolingUsage]:
        """Return the scores of the pairs: by the classifier, or by the similarity of their embeddings."""
        params = PoolingParams(use_activation=body.use_activation)
        spec = check_pooling(params, self._service.engine_info, self._served_task())
        check_scorer(spec)
        self._service.check_tokenizer()
        pairs = match_pairs(len(first), len(second), names)
        if spec.kind == "classify":
            texts = [(first[one], second[other]) for one, other in pairs]
            place = functools.partial(_place, names[1], len(second))
            has_template = self._has_pair_template
            make = functools.partial(encode_pairs, self._service, texts, body, place, has_template=has_template)
            pooled = await self._send(len(pairs), make, place, body, request)
            return [float(finish_vector(one.vector, spec, params)[0]) for one in pooled], _usage(pooled)

        def place_of(index: int) -> str:
            num_first = len(first)
            if index < num_first:
                return _place(names[0], num_first, index)
            return _place(names[1], len(second), index - num_first)

        make = functools.partial(encode_prompts, self._service, [*first, *second], body, True, place_of)
        pooled = await self._send(len(first) + len(second), make, place_of, body, request)
        vectors = [one.vector for one in pooled]
        return [cosine(vectors[one], vectors[len(first) + other]) for one, other in pairs], _usage(pooled)

    async def _send(
        self,
        num_prompts: int,
        make_prompts: Callable[[], Awaitable[Sequence[Prompt]]],
        place_of: PlaceOf,
        body: PoolingFields,
        request: Request,
    ) -> list[PooledPrompt]:
        state, service = request.scope["state"], self._service
        request_id = body.request_id or state["request_id"]
        job = PoolingJob(
            request_id=request_id,
            arrival=state["arrival"],
            options=service.request_options(body, request, request_id, service.find_model(body.model)),
        )
        return await pool_prompts(service, job, num_prompts, make_prompts, place_of)


def _place(name: str, num_texts: int, index: int) -> str:
    """Return the place of a text in the field `name`, which holds one text or a list of them."""
    return f"{name}[{index}]" if num_texts > 1 else name


def _usage(pooled: Sequence[PooledPrompt]) -> PoolingUsage:
    num_tokens = sum(len(one.prompt_token_ids) for one in pooled)
    return PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def _pair_fields(body: ScoreRequest) -> tuple[tuple[str, str], ScoringTexts, ScoringTexts]:
    """Return the names and values of the two fields with texts. Raises `InvalidRequest` unless there is one pair."""
    given = {name for names in PAIR_NAMES for name in names if getattr(body, name) is not None}
    for names in PAIR_NAMES:
        if given == set(names):
            return names, getattr(body, names[0]), getattr(body, names[1])
    shown = " and ".join(f"`{name}`" for name in sorted(given)) or "none"
    raise InvalidRequest(
        f"the texts must be in `text_1` and `text_2`, or in `queries` and `documents`, but the request has {shown}",
        param="text_1",
    )
