"""Lines of the log about requests, and what they show of texts."""

from __future__ import annotations

import logging

import pytest
from server_fakes import pool_ones, serving

from eagleray.config.pooling_spec import PoolingSpec
from eagleray.messages.outputs import Chunk, FinishReason

LOGGER = "eagleray.client.request_log"
HEADERS = {"X-Request-Id": "mine"}
BODY = {"prompt": "a secret text", "max_tokens": 3, "temperature": 0.5}


@pytest.fixture
def records(caplog):
    """Return the records of the log of requests since the last call."""
    caplog.set_level(logging.INFO, logger=LOGGER)

    def pop():
        found = [record for record in caplog.records if record.name == LOGGER]
        caplog.clear()
        return found

    return pop


def test_request_log_shows_parameters_and_no_prompt(checkpoint, records):
    with serving(checkpoint, enable_log_requests=True) as api:
        body = BODY | {"seed": 7, "stop": ["x" * 200], "logit_bias": {str(i): 1 for i in range(50)}}
        prompt_tokens = api.post("/v1/completions", body, headers=HEADERS).json()["usage"]["prompt_tokens"]
        [record] = records()
        api.post("/v1/completions", BODY | {"max_tokens": -1})
        assert records() == []
    assert (record.request_id, record.path, record.prompt_tokens) == ("mine", "/v1/completions", prompt_tokens)
    plain = {name: record.params[name] for name in ("seed", "max_tokens", "temperature")}
    assert plain == {"seed": 7, "max_tokens": 3, "temperature": 0.5}
    line = record.getMessage()
    start = f"request mine-0: path=/v1/completions prompt_tokens={prompt_tokens} temperature=0.5 top_k=7 seed=7 "
    assert line.startswith(start) and "\n" not in line
    assert "secret" not in line and len(line) < 400


def test_request_log_has_a_line_for_each_prompt_and_kind_of_request(checkpoint, records):
    with serving(checkpoint, enable_log_requests=True) as api:
        api.post("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 1}, headers=HEADERS)
        api.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "session_id": "s"})
        first, second, chat = records()
        api.join(pooling=PoolingSpec(kind="embed", method="last", activation="normalize"))
        api.engine.script = pool_ones
        api.post("/v1/embeddings", {"input": "a"}, headers=HEADERS)
        [embedding] = records()
    assert [(each.request_id, each.prompt_tokens) for each in (first, second)] == [("mine", 2), ("mine", 1)]
    assert (chat.path, chat.session) == ("/v1/chat/completions", "s")
    assert (embedding.path, hasattr(embedding, "params")) == ("/v1/embeddings", False)


def test_request_log_given_tokens_of_outputs_are_counted_not_shown(checkpoint, records):
    with serving(checkpoint, enable_log_requests=True) as api:
        body = {"token_ids": [1], "sampling_params": {"trace_decode_token_ids": [11, 12, 13]}}
        assert api.post("/inference/v1/generate", body).status_code == 200
    [record] = records()
    assert record.params["trace_decode_token_ids"] == "(3 entries)"
    assert "12" not in record.getMessage().partition("prompt_tokens")[2]


def test_request_log_at_debug_shows_prompts_within_the_limit(checkpoint, records, caplog):
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    with serving(checkpoint, enable_log_requests=True, max_log_len=8) as api:
        api.post("/v1/completions", BODY | {"prompt": "a\nsecret text"}, headers=HEADERS)
        api.post("/v1/completions", BODY | {"prompt": list(range(1, 20))})
    prompts = [record for record in records() if record.levelno == logging.DEBUG]
    assert [record.prompt for record in prompts] == ["a\nsecret", [1, 2, 3, 4, 5, 6, 7, 8]]
    assert prompts[0].getMessage() == r"request mine-0: prompt 'a\nsecret'"
    assert prompts[0].request_id == "mine"


@pytest.mark.parametrize("stream", [False, True])
def test_request_log_outputs_are_shown_whole_at_the_end(checkpoint, records, stream):
    with serving(checkpoint, enable_log_requests=True, enable_log_outputs=True, max_log_len=5) as api:
        body = BODY | {"max_tokens": 9, "n": 2, "stream": stream}
        if stream:
            api.events("/v1/completions", body, headers=HEADERS)
        else:
            texts = [choice["text"] for choice in api.post("/v1/completions", body, headers=HEADERS).json()["choices"]]
            assert min(map(len, texts)) > 5
    _, *ends = records()
    assert [(end.request_id, end.completion, end.completion_tokens) for end in ends] == [("mine", 0, 9), ("mine", 1, 9)]
    assert all(len(end.output) == 5 for end in ends)
    assert stream or [end.output for end in ends] == [text[:5] for text in texts]
    assert ends[0].getMessage() == f"request mine-0, completion 0: stop after 9 tokens: {ends[0].output!r}"


def test_request_log_output_of_a_request_that_fails_names_the_error(checkpoint, records):
    def fail(request):
        yield Chunk(request_id=request.request_id, finish_reason=FinishReason.ERROR, error="out of luck")

    with serving(checkpoint, enable_log_requests=True, enable_log_outputs=True) as api:
        api.engine.script = fail
        assert api.post("/v1/completions", BODY).status_code == 500
    _, end = records()
    assert (end.finish_reason, end.completion_tokens) == ("RequestFailed", 0)


def test_request_log_off_has_no_lines(checkpoint, records, caplog):
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    with serving(checkpoint) as api:
        api.post("/v1/completions", BODY)
    assert records() == []


def test_request_log_above_the_level_is_one_warning(checkpoint, records, caplog):
    caplog.set_level(logging.WARNING, logger=LOGGER)
    with serving(checkpoint, enable_log_requests=True, enable_log_outputs=True) as api:
        api.post("/v1/completions", BODY)
    [record] = records()
    assert "requests are logged only at the levels info and debug" in record.getMessage()
