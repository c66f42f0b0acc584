"""The routes of pooling models, field by field."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from server_fakes import Api, Call, serving, settle

from eagleray.config.pooling_spec import PoolingSpec
from eagleray.identity import EngineId
from eagleray.messages.membership import Left
from eagleray.messages.outputs import Chunk, FinishReason

OTHER = EngineId("test", 1)
EMBEDS = PoolingSpec(kind="embed", method="last", activation="normalize")
SCORES = PoolingSpec(kind="classify", method="last", activation="sigmoid", labels=("relevant",))
CLASSIFIES = PoolingSpec(kind="classify", method="last", activation="softmax", labels=("no", "maybe", "yes"))


def vector_of(prompt, size):
    """Return the vector that the fake engine reports for a prompt: it depends on its length and its last token."""
    numbers = [float(len(prompt)), prompt[-1] / 100, -1.0, 0.5]
    return np.array(numbers[:size], np.float32)


def serve(api: Api, spec: PoolingSpec, **options) -> Api:
    def pool(request):
        assert request.pools
        assert request.stopping.max_tokens == 1
        vector = vector_of(request.prompt_token_ids, len(spec.labels) or 4)
        yield Chunk(request_id=request.request_id, pooled=vector, finish_reason=FinishReason.STOP)

    api.join(pooling=spec, **options)
    api.engine.script = pool
    return api


@pytest.fixture
def embedder(api) -> Api:
    return serve(api, EMBEDS)


@pytest.fixture
def reranker(api) -> Api:
    return serve(api, SCORES)


@pytest.fixture
def classifier(api) -> Api:
    return serve(api, CLASSIFIES)


@pytest.fixture
def templated(checkpoint, tmp_path) -> Iterator[Api]:
    template = tmp_path / "pair.jinja"
    template.write_text(
        "{{ instruction }}:{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    )
    with serving(checkpoint, chat_template=str(template)) as api:
        yield serve(api, SCORES)


def ids(api, text):
    return api.client.tokenizer.encode(text, add_special_tokens=True)


def normalized(vector):
    return vector / np.linalg.norm(vector)


def sigmoid(number):
    return 1 / (1 + np.exp(-number))


def answer(api, path, **body):
    response = api.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(api, path, **body):
    response = api.post(path, body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_embeddings_answer_has_openais_shape(embedder):
    response = embedder.post(
        "/v1/embeddings", {"model": "tiny", "input": ["hello", "hello there"]}, headers={"X-Request-Id": "mine"}
    )
    body = response.json()
    assert body.pop("created") > 0
    prompts = [ids(embedder, "hello"), ids(embedder, "hello there")]
    data = body.pop("data")
    num_tokens = sum(map(len, prompts))
    assert body == {
        "id": "embd-mine",
        "object": "list",
        "model": "tiny",
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }
    for index, (item, prompt) in enumerate(zip(data, prompts, strict=True)):
        assert (item["index"], item["object"]) == (index, "embedding")
        np.testing.assert_allclose(item["embedding"], normalized(vector_of(prompt, 4)), rtol=1e-6)
    assert [request.prompt_token_ids for request in embedder.engine.requests] == prompts
    assert embedder.client.num_requests == 0


@pytest.mark.parametrize("given", [[5, 6, 7], [[5, 6, 7]]])
def test_embeddings_token_ids_are_taken_as_they_are(embedder, given):
    answer(embedder, "/v1/embeddings", input=given)
    assert embedder.engine.requests[-1].prompt_token_ids == [5, 6, 7]


def test_embeddings_conversation_is_rendered_without_a_beginning_of_an_answer(embedder):
    answer(embedder, "/v1/embeddings", messages=[{"role": "user", "content": "hello"}])
    text = embedder.client.tokenizer.decode(embedder.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [({}, "<f4"), ({"embed_dtype": "float16"}, "<f2"), ({"endianness": "big"}, ">f4")],
)
def test_embeddings_base64_holds_the_numbers(embedder, fields, dtype):
    plain = answer(embedder, "/v1/embeddings", input=[5, 6])["data"][0]["embedding"]
    text = answer(embedder, "/v1/embeddings", input=[5, 6], encoding_format="base64", **fields)["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(text), dtype), plain, rtol=1e-3)


def test_embeddings_without_activation_are_as_pooled(embedder):
    data = answer(embedder, "/v1/embeddings", input=[5, 6], use_activation=False)["data"]
    np.testing.assert_allclose(data[0]["embedding"], vector_of([5, 6], 4))


def test_embeddings_dimensions_are_cut_before_they_are_normalized(api):
    serve(api, PoolingSpec(kind="embed", method="last", activation="normalize", is_matryoshka=True))
    data = answer(api, "/v1/embeddings", input=[5, 6], dimensions=2)["data"]
    np.testing.assert_allclose(data[0]["embedding"], normalized(vector_of([5, 6], 2)), rtol=1e-6)


@pytest.mark.parametrize("dimensions", [0, -1, 5, 2**70])
def test_embeddings_impossible_dimensions_are_refused(embedder, dimensions):
    error = refusal(embedder, "/v1/embeddings", input=[5, 6], dimensions=dimensions)
    assert "dimensions" in error["message"]
    assert embedder.engine.requests == []


def test_embeddings_dimensions_need_a_model_that_was_trained_for_them(embedder):
    assert answer(embedder, "/v1/embeddings", input=[5, 6], dimensions=4)["data"]
    error = refusal(embedder, "/v1/embeddings", input=[5, 6], dimensions=2)
    assert "was not trained for embeddings of fewer than 4 dimensions" in error["message"]
    assert "`hf_overrides`" in error["message"]
    serve(
        embedder,
        PoolingSpec(
            kind="embed", method="last", activation="normalize", is_matryoshka=True, matryoshka_dimensions=(1, 3)
        ),
    )
    error = refusal(embedder, "/v1/embeddings", input=[5, 6], dimensions=2)
    assert "must be one of 1, 3" in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give either `input` or `messages`"),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "give either `input` or `messages`"),
        ({"input": []}, "`input` is empty"),
        ({"input": [[]]}, "needs at least one token"),
        ({"input": [1, [2]]}, "mixes token ids with whole prompts"),
        ({"input": [999999]}, "token id 999999 is out of range"),
        ({"input": [1] * 65}, "length is 64 tokens. The prompt is too long: it has 65 tokens; shorten it"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "request_id": "x" * 257}, "`request_id`: expected `str` of length <= 256"),
        ({"input": "a", "request_id": "x\n"}, "`request_id` must be made of printable characters"),
        ({"input": "a", "priority": 3}, "`priority` has no effect"),
    ],
)
def test_embeddings_wrong_fields_are_refused_with_a_sentence(embedder, body, message):
    assert message in refusal(embedder, "/v1/embeddings", **body)["message"]
    assert embedder.client.num_requests == 0


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [5, -1]}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": [[5], [6], [999999]]}, "input[2]"),
        ("/v1/embeddings", {"input": [[5], [6] * 65]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a", "b" * 100_000]}, "input[1]"),
        ("/rerank", {"query": "", "documents": ["a", "b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2"),
    ],
)
def test_pooling_error_about_one_prompt_names_its_place(embedder, path, body, place):
    error = refusal(embedder, path, **body)
    assert error["param"] == place
    assert error["message"].startswith(f"`{place}`: ")
    assert "`prompt`" not in error["message"]
    assert embedder.client.num_requests == 0


@pytest.mark.parametrize("given", ["b" * 100_000, [1] * 65])
def test_embeddings_error_about_length_speaks_of_no_output(embedder, given):
    message = refusal(embedder, "/v1/embeddings", input=given)["message"]
    assert "maximum context length is 64 tokens. The prompt is too long: " in message
    assert message.endswith("; shorten it to at most 64.")


def test_score_error_about_one_pair_names_its_place(reranker):
    assert refusal(reranker, "/score", text_1="a", text_2=["b", "c" * 100_000])["param"] == "text_2[1]"


def test_embeddings_prompt_of_full_length_is_accepted(embedder):
    assert answer(embedder, "/v1/embeddings", input=[1] * 64)["usage"]["prompt_tokens"] == 64


def test_embeddings_failure_of_one_prompt_aborts_the_others(embedder):
    def fail(request):
        if request.prompt_token_ids == [2]:
            yield Chunk(request_id=request.request_id, finish_reason=FinishReason.ERROR, error="it is broken")

    embedder.engine.script = fail
    response = embedder.post("/v1/embeddings", {"input": [[1], [2], [3]]})
    assert response.status_code == 500
    assert "it is broken" in response.json()["error"]["message"]
    assert len(embedder.engine.aborted) == 2
    assert embedder.client.num_requests == 0


def test_embeddings_of_generating_model_are_refused_with_the_way(api):
    assert "start it with `--runner pooling`" in refusal(api, "/v1/embeddings", input="hello")["message"]
    assert "start it with `--runner pooling`" in refusal(api, "/score", text_1="a", text_2="b")["message"]
    assert api.engine.requests == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions/render", {"prompt": "hello"}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_generation_by_pooling_model_is_refused_with_the_way(embedder, path, body):
    assert "is served for pooling and does not generate" in refusal(embedder, path, **body)["message"]
    assert embedder.engine.requests == []


def test_pooling_route_gives_what_the_model_is_served_for(classifier):
    body = answer(classifier, "/pooling", input=[5, 6])
    (item,) = body["data"]
    assert (body["id"][:5], item["object"], item["index"]) == ("pool-", "pooling", 0)
    np.testing.assert_allclose(sum(item["data"]), 1, rtol=1e-6)
    raw = answer(classifier, "/pooling", input=[5, 6], use_activation=False, task="classify")["data"][0]["data"]
    np.testing.assert_allclose(raw, vector_of([5, 6], 3))
    assert "does not embed" in refusal(classifier, "/pooling", input=[5, 6], task="embed")["message"]


def test_classify_names_the_likeliest_class(classifier):
    (item,) = answer(classifier, "/classify", input=[5, 6])["data"]
    assert (item["label"], item["num_classes"], len(item["probs"])) == ("no", 3, 3)
    weights = np.exp(vector_of([5, 6], 3))
    np.testing.assert_allclose(item["probs"], weights / weights.sum(), rtol=1e-6)


def test_classify_by_embedding_model_is_refused(embedder):
    assert "this is an embedding model" in refusal(embedder, "/classify", input="hello")["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score_embeddings_are_compared_by_their_angle(embedder, path):
    body = answer(embedder, path, text_1="hello", text_2=["hello", "hello there"])
    prompts = [ids(embedder, text) for text in ("hello", "hello", "hello there")]
    first, *others = [normalized(vector_of(prompt, 4)) for prompt in prompts]
    assert [(item["index"], item["object"]) for item in body["data"]] == [(0, "score"), (1, "score")]
    np.testing.assert_allclose([item["score"] for item in body["data"]], [first @ other for other in others], rtol=1e-5)
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")])
def test_score_classifier_gets_both_texts_in_one_prompt(reranker, names):
    body = answer(reranker, "/score", **{names[0]: ["hel", "wor"], names[1]: ["lo", {"text": "ld"}]})
    prompts = [ids(reranker, "hello"), ids(reranker, "world")]
    assert [request.prompt_token_ids for request in reranker.engine.requests] == prompts
    expected = [sigmoid(vector_of(prompt, 1)[0]) for prompt in prompts]
    np.testing.assert_allclose([item["score"] for item in body["data"]], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_1": "a"}, "but the request has `text_1`"),
        ({"text_1": "a", "documents": "b"}, "but the request has `documents` and `text_1`"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "`text_1` has 2 texts and `text_2` has 1"),
        ({"text_1": "a", "text_2": []}, "`text_2` is empty"),
        ({"text_1": "a", "text_2": [{}]}, "entry 0 has neither `text` nor `content`"),
        ({"text_1": "a", "text_2": "b", "instruction": "c"}, "`instruction` is for the template"),
    ],
)
def test_score_wrong_texts_are_refused(reranker, body, message):
    assert message in refusal(reranker, "/score", **body)["message"]


def test_score_classifier_of_several_classes_is_refused(classifier):
    assert "this one has 3" in refusal(classifier, "/score", text_1="a", text_2="b")["message"]


def test_score_template_joins_the_texts(templated):
    answer(templated, "/score", text_1="hello", text_2="world", instruction="again")
    text = templated.client.tokenizer.decode(templated.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert text == "again:<query>hello<document>world"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_results_are_ordered_by_relevance(reranker, path):
    documents = ["", " world world", {"content": [{"type": "text", "text": " there"}]}]
    body = answer(reranker, path, query="hello", documents=documents)
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {result["index"]: result["document"]["text"] for result in body["results"]} == {
        0: "",
        1: " world world",
        2: " there",
    }
    assert body["results"][-1]["index"] == 0
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0


def test_rerank_top_n_cuts_the_results(reranker):
    fields = {"query": "hello", "documents": [" world", " world world", ""]}
    body = answer(reranker, "/rerank", top_n=1, return_documents=False, **fields)
    assert [(result["index"], "document" in result) for result in body["results"]] == [(1, False)]
    assert len(answer(reranker, "/rerank", top_n=0, **fields)["results"]) == 3


def test_pooling_more_prompts_than_may_be_queued_are_refused(checkpoint):
    with serving(checkpoint, max_seqs_per_request=2) as api:
        serve(api, EMBEDS)
        assert "may have at most 2" in refusal(api, "/v1/embeddings", input=[[1], [2], [3]])["message"]


def test_pooling_request_is_sent_again_when_its_engine_exits(checkpoint):
    with serving(checkpoint, data_parallel_size=2) as api:
        serve(api, EMBEDS)
        api.join(OTHER, pooling=EMBEDS)
        script, api.engine.script = api.engine.script, None

        async def embed() -> str:
            call = Call(api.app, "/v1/embeddings", {"input": [5, 6]})
            await settle()
            api.engine.script = script
            api.engine.deliver(Left(api.engine.receivers[-1], "it was killed", True))
            await call.task
            return call.text

        assert json.loads(api.run(embed()))["usage"]["prompt_tokens"] == 2
        first, second = api.engine.requests
        assert second == msgspec.structs.replace(first, request_id=second.request_id, announce_start=True)
        assert len(set(api.engine.receivers)) == 2


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [1, 2]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [69, 70]),
        ({"truncate_prompt_tokens": -1}, [*range(1, 65)]),
    ],
)
def test_embeddings_truncated_prompt_keeps_its_first_tokens(embedder, fields, kept):
    answer(embedder, "/v1/embeddings", input=[*range(1, 71)], **fields)
    assert embedder.engine.requests[-1].prompt_token_ids == kept


def test_embeddings_unknown_field_is_ignored_and_named(embedder):
    response = embedder.post("/v1/embeddings", {"input": "hello", "user": "me", "something": 1})
    assert (response.status_code, response.headers["X-Eagleray-Ignored"]) == (200, "something")


def test_rerank_limits_of_single_texts_are_refused_unless_off(reranker):
    fields = {"query": "a", "documents": ["b"]}
    assert answer(reranker, "/rerank", max_tokens_per_doc=0, **fields)["results"]
    assert "truncation of one text of a pair" in refusal(reranker, "/rerank", max_tokens_per_doc=9, **fields)["message"]


def test_score_pairs_of_too_many_tokens_are_refused_before_all_are_joined(checkpoint):
    with serving(checkpoint, max_request_tokens=500) as api:
        serve(api, SCORES)
        error = refusal(api, "/score", text_1="hello " * 20, text_2=["a"] * 200)
        assert "it may have at most 500" in error["message"]
        assert int(error["message"].split("has ")[1].split()[0]) < 1000
        assert api.client.num_requests == 0
