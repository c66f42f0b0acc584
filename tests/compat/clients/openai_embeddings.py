"""openai-python: embeddings of texts and token ids, in both encodings, and their errors."""

from __future__ import annotations

import openai
from checking import MODEL, URL, check, expect, expect_raises, run_checks

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120.0)


def embed(given, **fields):
    return [item.embedding for item in client.embeddings.create(model=MODEL, input=given, **fields).data]


def expect_close(one, other):
    expect(max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-3, "different vectors:", one[:4], other[:4])


@check("embeddings")
def embeddings():
    answer = client.embeddings.create(model=MODEL, input="a list")
    expect(abs(sum(number**2 for number in answer.data[0].embedding) - 1) < 1e-3, "not normalized")
    expect(answer.usage.total_tokens == answer.usage.prompt_tokens > 0, "usage", answer.usage)


@check("several texts")
def several():
    both = embed(["a list", "a tuple"])
    for vector, text in zip(both, ("a list", "a tuple"), strict=True):
        expect_close(vector, embed(text)[0])


@check("token ids")
def token_ids():
    expect_close(embed([[5, 6, 7]])[0], embed([5, 6, 7])[0])


@check("encoding_format")
def encodings():
    # without a format, the client asks for base64 and decodes it
    expect_close(embed("a list")[0], embed("a list", encoding_format="float")[0])


@check("dimensions")
def dimensions():
    (vector,) = embed("a list", dimensions=8)
    expect(len(vector) == 8, "dimensions", len(vector))
    expect(abs(sum(number**2 for number in vector) - 1) < 1e-3, "not normalized")


@check("prompt that is too long")
def too_long():
    error = expect_raises(openai.BadRequestError, lambda: embed([5] * 5000))
    expect(error.code == "context_length_exceeded", "code", error.code)


@check("chat is refused with a sentence")
def chat():
    messages = [{"role": "user", "content": "What is a list?"}]
    error = expect_raises(
        openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=messages)
    )
    expect(len(error.message) > 20, "message", error.message)


if __name__ == "__main__":
    run_checks()
