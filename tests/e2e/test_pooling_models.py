"""Embedding models and classifiers, served and in a program: their numbers are those of transformers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from checkpoints import make_pooling_checkpoint
from serving import serve
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from eagleray import LLM, AsyncLLM, PoolingParams
from eagleray.errors import InvalidRequest

TEXTS = ["Hello world", "The quick brown fox jumps over the lazy dog. " * 4, "Grüße aus Köln"]
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
SECONDS = 60


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return make_pooling_checkpoint(
        tmp_path_factory.mktemp("embedder"),
        "qwen3",
        modules={"Pooling": "mean", "Normalize": ""},
        is_prefixed=False,
        is_matryoshka=True,
    )


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return make_pooling_checkpoint(tmp_path_factory.mktemp("reranker"), "qwen3", num_labels=1)


def token_ids(checkpoint: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"]


def normalized(vector):
    return vector / np.linalg.norm(vector)


@torch.inference_mode()
def mean_state(checkpoint: Path, text: str):
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return model(torch.tensor([token_ids(checkpoint, text)])).last_hidden_state[0].mean(0).numpy()


@torch.inference_mode()
def relevance(checkpoint: Path, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return torch.sigmoid(model(torch.tensor([token_ids(checkpoint, text)])).logits[0, 0]).item()


def test_server_of_embedding_model_serves_openais_client_while_engines_are_killed(embedder):
    options = ("--served-model-name", "tiny", "--data-parallel-size", "2", "--max-num-batched-tokens", "32")
    with (
        serve(str(embedder), *options, "--log-level", "debug") as server,
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=SECONDS) as client,
    ):
        expected = [mean_state(embedder, text) for text in TEXTS]
        answer = client.embeddings.create(model="tiny", input=TEXTS)
        for item, vector in zip(answer.data, expected, strict=True):
            np.testing.assert_allclose(item.embedding, normalized(vector), **TOLERANCE)
        short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=16, encoding_format="float")
        np.testing.assert_allclose(short.data[0].embedding, normalized(expected[0][:16]), **TOLERANCE)
        assert answer.usage.prompt_tokens == sum(len(token_ids(embedder, text)) for text in TEXTS)
        with pytest.raises(openai.BadRequestError, match="is served for pooling and does not generate"):
            client.completions.create(model="tiny", prompt="Hello")

        begun = threading.Barrier(2)

        def embed_many():
            begun.wait(SECONDS)
            return [client.embeddings.create(model="tiny", input=TEXTS) for _ in range(20)]

        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(embed_many)
            begun.wait(SECONDS)
            os.kill(server.child("engine-0"), signal.SIGKILL)
            for again in answers.result(SECONDS):
                for item, vector in zip(again.data, expected, strict=True):
                    np.testing.assert_allclose(item.embedding, normalized(vector), **TOLERANCE)
        server.wait_for("engine-0 .*SIGKILL", SECONDS)
    assert server.process.returncode == 0, server.log


def test_llm_of_classifier_scores_pairs_as_transformers(reranker):
    query, documents = "Hello there", ["the fox", "how are you today?"]
    with LLM(str(reranker), num_threads=1) as llm:
        scores = llm.score(query, documents, use_tqdm=False)
        expected = [relevance(reranker, query + document) for document in documents]
        np.testing.assert_allclose([score.outputs.score for score in scores], expected, **TOLERANCE)
        (classified,) = llm.classify(query, use_tqdm=False)
        assert classified.outputs.num_classes == 1
        np.testing.assert_allclose(classified.outputs.probs, [relevance(reranker, query)], **TOLERANCE)
        (raw,) = llm.encode({"prompt": query}, PoolingParams(use_activation=False), use_tqdm=False)
        probability = 1 / (1 + np.exp(-raw.outputs.data[0]))
        np.testing.assert_allclose(probability, relevance(reranker, query), **TOLERANCE)
        assert raw.prompt_token_ids == token_ids(reranker, query)
        with pytest.raises(InvalidRequest, match="the model does not embed, because this is a classifier"):
            llm.embed(query, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="is served for pooling"):
            llm.generate(query, use_tqdm=False)
        with pytest.raises(InvalidRequest, match=r"^prompt 1: .*token id 9999 is out of range"):
            llm.classify([query, [9999]], use_tqdm=False)


def test_llm_of_embedding_model_compares_texts(embedder):
    with LLM(str(embedder), num_threads=1, max_num_batched_tokens=16) as llm:
        (embedded,) = llm.embed(TEXTS[1], use_tqdm=False)
        np.testing.assert_allclose(embedded.outputs.embedding, normalized(mean_state(embedder, TEXTS[1])), **TOLERANCE)
        scores = llm.score([TEXTS[0], TEXTS[1]], [TEXTS[2], TEXTS[2]], use_tqdm=False)
        first, second, third = [normalized(mean_state(embedder, text)) for text in TEXTS]
        np.testing.assert_allclose(
            [score.outputs.score for score in scores], [first @ third, second @ third], **TOLERANCE
        )


def test_async_llm_encodes_prompts_beside_each_other(embedder):
    async def encode_all() -> list[list[float]]:
        async def encode(text: str) -> list[float]:
            (output,) = [output async for output in llm.encode(text)]
            assert output.finished
            return output.outputs.data.tolist()

        return await asyncio.gather(*map(encode, TEXTS))

    llm = AsyncLLM(str(embedder), num_threads=1)
    try:
        for vector, text in zip(asyncio.run(encode_all()), TEXTS, strict=True):
            np.testing.assert_allclose(vector, normalized(mean_state(embedder, text)), **TOLERANCE)
        assert llm.get_num_unfinished_requests() == 0
    finally:
        llm.shutdown()
