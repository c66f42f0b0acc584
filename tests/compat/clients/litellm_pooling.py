"""litellm: embeddings by its two providers for such servers, and reranking."""

from __future__ import annotations

import litellm
from checking import MODEL, URL, check, expect, run_checks

litellm.telemetry = False
SETTINGS = {"api_base": f"{URL}/v1", "api_key": "none", "timeout": 120}
TEXTS = ["a list", "a tuple"]


def embed(provider):
    answer = litellm.embedding(model=f"{provider}/{MODEL}", input=TEXTS, encoding_format="float", **SETTINGS)
    expect(len({len(item["embedding"]) for item in answer.data}) == 1, "vectors of several lengths")
    expect(len(answer.data) == len(TEXTS), "number of vectors", len(answer.data))


@check("embedding by openai/")
def openai_provider():
    embed("openai")


@check("embedding by hosted_vllm/")
def vllm_provider():
    embed("hosted_vllm")


@check("rerank")
def rerank():
    answer = litellm.rerank(model=f"hosted_vllm/{MODEL}", query="a tuple", documents=TEXTS, top_n=1, **SETTINGS)
    (result,) = answer.results
    expect(result["index"] == 1 and result["relevance_score"] > 0.99, "result", result)


if __name__ == "__main__":
    run_checks()
