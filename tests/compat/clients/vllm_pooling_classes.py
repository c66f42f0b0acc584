"""vLLM's own request and response classes of pooling models, as in `vllm_classes`."""

from __future__ import annotations

from checking import MODEL, check, expect, run_checks
from vllm.entrypoints.pooling.embed import protocol as embed
from vllm.entrypoints.pooling.pooling import protocol as pooling
from vllm.entrypoints.pooling.scoring import protocol as scoring
from vllm_requests import MESSAGES, check_keys, post

TEXTS = ["a list", "a tuple"]


def check_answer(path, request, response_type):
    """Return the answer to a request, as vLLM's class has read it."""
    answer = post(path, request)
    read = response_type.model_validate_json(answer)
    check_keys(answer, read)
    return read


@check("EmbeddingCompletionRequest, EmbeddingResponse")
def embed_texts():
    for encoding in ("float", "base64"):
        request = embed.EmbeddingCompletionRequest(model=MODEL, input=TEXTS, dimensions=8, encoding_format=encoding)
        expect(len(check_answer("/v1/embeddings", request, embed.EmbeddingResponse).data) == 2, "not two vectors")


@check("EmbeddingChatRequest")
def embed_chat():
    request = embed.EmbeddingChatRequest(model=MODEL, messages=MESSAGES)
    check_answer("/v1/embeddings", request, embed.EmbeddingResponse)


@check("PoolingCompletionRequest, PoolingChatRequest, PoolingResponse")
def pool():
    check_answer("/pooling", pooling.PoolingCompletionRequest(model=MODEL, input=TEXTS), pooling.PoolingResponse)
    check_answer("/pooling", pooling.PoolingChatRequest(model=MODEL, messages=MESSAGES), pooling.PoolingResponse)


@check("ScoreTextRequest, ScoreQueriesDocumentsRequest, ScoreQueriesItemsRequest, ScoreDataRequest, ScoreResponse")
def score():
    for request in (
        scoring.ScoreTextRequest(model=MODEL, text_1="a tuple", text_2=TEXTS),
        scoring.ScoreQueriesDocumentsRequest(model=MODEL, queries="a tuple", documents=TEXTS),
        scoring.ScoreQueriesItemsRequest(model=MODEL, queries="a tuple", items=TEXTS),
        scoring.ScoreDataRequest(model=MODEL, data_1="a tuple", data_2=TEXTS),
    ):
        first, second = check_answer("/score", request, scoring.ScoreResponse).data
        expect(first.score < second.score, "the same text scores less than another")


@check("RerankRequest, RerankResponse")
def rerank():
    request = scoring.RerankRequest(model=MODEL, query="a tuple", documents=TEXTS)
    expect(check_answer("/rerank", request, scoring.RerankResponse).results[0].index == 1, "another text is the best")


if __name__ == "__main__":
    run_checks()
