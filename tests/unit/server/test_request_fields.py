"""Fields of vLLM's requests that change prompts, log-probabilities or streams of OpenAI's routes."""

from __future__ import annotations

import pytest
from server_fakes import Chunk, FinishReason, serving

from eagleray.messages.outputs import TokenLogprobs

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hello"}
PROMPTS = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "hello again"}}
TEXT = "hello world again hello there"


def post(api, path, **fields):
    response = api.post(path, PROMPTS[path] | {"max_tokens": 2} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(api, path, **fields):
    response = api.post(path, PROMPTS[path] | {"max_tokens": 2} | fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def sent_ids(api):
    return api.engine.requests[-1].prompt_token_ids


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize(("side", "part"), [(None, slice(-3, None)), ("left", slice(-3, None)), ("right", slice(3))])
def test_truncate_prompt_tokens_keeps_one_side(api, side, part, as_ids):
    ids = api.client.tokenizer.encode(TEXT, add_special_tokens=True)
    post(api, COMPLETIONS, prompt=ids if as_ids else TEXT, truncate_prompt_tokens=3, truncation_side=side)
    assert sent_ids(api) == ids[part]


def test_truncate_prompt_tokens_of_a_long_text_keeps_its_end(api):
    ids = api.client.tokenizer.encode(TEXT, add_special_tokens=True)
    answer = post(api, COMPLETIONS, prompt="again and " * 10**5 + TEXT, truncate_prompt_tokens=-1, max_tokens=None)
    assert len(sent_ids(api)) == 63  # of the model's length of 64
    assert sent_ids(api)[-len(ids) + 1 :] == ids[1:]
    assert answer["usage"]["prompt_tokens"] == 63
    post(api, COMPLETIONS, prompt=TEXT, truncate_prompt_tokens=60)
    assert sent_ids(api) == ids


def test_truncate_prompt_tokens_of_a_conversation_keeps_its_end(api):
    post(api, CHAT)
    whole = sent_ids(api)
    answer = post(api, CHAT, truncate_prompt_tokens=5, return_prompt_text=True, return_token_ids=True)
    assert sent_ids(api) == answer["prompt_token_ids"] == whole[-5:]
    assert answer["prompt_text"].endswith("<|im_start|>assistant\n")
    assert "hello" in answer["prompt_text"]


def test_truncated_prompt_is_echoed_as_it_is(api):
    answer = post(api, COMPLETIONS, prompt=TEXT, truncate_prompt_tokens=2, echo=True, logprobs=0)
    kept = api.client.tokenizer.decode(sent_ids(api), skip_special_tokens=False)
    assert answer["choices"][0]["text"] == kept + "hello world"[: len(answer["choices"][0]["text"]) - len(kept)]
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 4


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("value", [-2, 2**63, 10**400, 65, "x", [3]])
def test_truncate_prompt_tokens_of_a_wrong_value_is_refused(api, path, value):
    assert refusal(api, path, truncate_prompt_tokens=value)["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_truncate_prompt_tokens_of_zero_is_refused_by_its_name(path, api):
    error = refusal(api, path, truncate_prompt_tokens=0)
    assert error["param"] == "truncate_prompt_tokens"
    assert "leaves no prompt: give at least 1, or -1" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_truncation_side_of_another_name_is_refused(api, path):
    error = refusal(api, path, truncate_prompt_tokens=3, truncation_side="middle")
    assert error["param"] == "truncation_side"


def test_return_tokens_as_token_ids_names_tokens_by_id(api):
    first, second = (f"token_id:{token_id}" for token_id in api.speech[:2])
    (choice,) = post(api, COMPLETIONS, logprobs=1, return_tokens_as_token_ids=True)["choices"]
    plain = post(api, COMPLETIONS, logprobs=1)["choices"][0]["logprobs"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [first, second]
    assert list(logprobs["top_logprobs"][0]) == [f"token_id:{api.speech[0] + 1}", first]
    assert logprobs["text_offset"] == plain["text_offset"]
    assert logprobs["token_logprobs"] == plain["token_logprobs"]
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    content = post(api, CHAT, **fields)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [first, second]
    assert bytes(content[0]["bytes"]).decode() == plain["tokens"][0]
    events = api.events(CHAT, PROMPTS[CHAT] | {"max_tokens": 1} | fields)
    assert events[0]["choices"][0]["logprobs"]["content"] == content[:1]


def test_return_tokens_as_token_ids_of_the_server_is_the_default(checkpoint):
    with serving(checkpoint, return_tokens_as_token_ids=True) as api:
        name = f"token_id:{api.speech[0]}"
        assert post(api, COMPLETIONS, logprobs=0)["choices"][0]["logprobs"]["tokens"][0] == name
        fields = {"logprobs": 0, "return_tokens_as_token_ids": False}
        assert post(api, COMPLETIONS, **fields)["choices"][0]["logprobs"]["tokens"][0] != name
        body = {"token_ids": [5], "output_mode": "text", "sampling_params": {"max_tokens": 1, "logprobs": 0}}
        choice = api.post("/inference/v1/generate", body).json()["choices"][0]
        assert choice["logprobs"]["content"][0]["token"] == name


def test_all_logprobs_need_a_server_without_a_limit(api, checkpoint):
    for fields in ({"logprobs": True, "top_logprobs": -1}, {"prompt_logprobs": -1}):
        assert refusal(api, CHAT, **fields)["param"] == [*fields][-1]

    def script(message):
        reported = TokenLogprobs([5, *range(320)], [-5.0, *(-float(rank) for rank in range(320))], 6)
        yield Chunk(
            request_id=message.request_id, token_ids=[5], logprobs=[reported], finish_reason=FinishReason.LENGTH
        )

    with serving(checkpoint, max_logprobs=-1) as unlimited:
        unlimited.engine.script = script
        answer = post(unlimited, CHAT, logprobs=True, top_logprobs=-1)
        assert unlimited.engine.requests[-1].sampling.logprobs == 320
        assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 320
        post(unlimited, COMPLETIONS, logprobs=-1)
        assert unlimited.engine.requests[-1].sampling.logprobs == 320
        assert refusal(unlimited, COMPLETIONS, logprobs=321)["param"] == "logprobs"


ASSISTANT = {"role": "assistant", "content": "Well, "}
OPEN = {"messages": [USER, ASSISTANT], "add_generation_prompt": False, "continue_final_message": True}


def test_chat_echo_begins_with_the_open_message(api):
    answer = post(api, CHAT, **OPEN, echo=True, logprobs=True, top_logprobs=1, n=2, seed=1)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert all(text.startswith("Well, hello") for text in texts)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    events = api.events(CHAT, OPEN | {"echo": True, "max_tokens": 2, "n": 2, "seed": 1})
    streamed = ["", ""]
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


def test_chat_echo_after_a_user_shows_nothing_of_the_user(api):
    assert post(api, CHAT, echo=True)["choices"][0]["message"] == post(api, CHAT)["choices"][0]["message"]


def test_chat_prompt_logprobs_stand_beside_the_choices(api):
    answer = post(api, CHAT, prompt_logprobs=1)
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_return_prompt_text_shows_what_the_template_wrote(api):
    text = post(api, CHAT, return_prompt_text=True)["prompt_text"]
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    events = api.events(CHAT, PROMPTS[CHAT] | {"max_tokens": 2, "return_prompt_text": True})
    assert events[0]["prompt_text"] == text
    assert not any(event.get("prompt_text") for event in events[1:])
    assert not post(api, CHAT).get("prompt_text")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_request_id_of_the_body_names_the_answer(api, path):
    assert post(api, path, request_id="my-own")["id"].endswith("-my-own")
    assert refusal(api, path, request_id="a\nb")["param"] == "request_id"
    assert refusal(api, path, request_id="x" * 257)["param"] == "request_id"
    assert refusal(api, path, session_id="x" * 257)["param"] == "session_id"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stream_interval_collects_tokens_of_an_event(api, path):
    body = PROMPTS[path] | {"max_tokens": 6, "return_token_ids": True}
    sizes = [len(event["choices"][0]["token_ids"]) for event in api.events(path, body | {"stream_interval": 3})]
    assert sizes == [1, 3, 2]
    assert [len(event["choices"][0]["token_ids"]) for event in api.events(path, body)] == [1] * 6
    assert post(api, path, stream_interval=3, return_token_ids=True)["choices"][0]["token_ids"] == api.speech[:2]
    for value in (0, -1, 1.5):
        assert refusal(api, path, stream_interval=value)["param"] == "stream_interval"


def test_stream_interval_of_the_server_is_the_least(checkpoint):
    with serving(checkpoint, stream_interval=4) as api:
        body = PROMPTS[COMPLETIONS] | {"max_tokens": 6, "return_token_ids": True, "stream_interval": 2}
        events = api.events(COMPLETIONS, body)
        assert [len(event["choices"][0]["token_ids"]) for event in events] == [1, 4, 1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_repetition_detection_ends_a_completion(api, path):
    def script(message):
        for _ in range(9):
            yield Chunk(request_id=message.request_id, token_ids=[7])
        yield Chunk(request_id=message.request_id, token_ids=[8], finish_reason=FinishReason.LENGTH)

    api.engine.script = script
    detection = {"max_pattern_size": 2, "min_count": 4}
    answer = post(api, path, repetition_detection=detection, max_tokens=20, return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([7] * 4, "repetition")
    assert choice["stop_reason"] == "repetition_detected"
    assert len(api.engine.aborted) == 1
    error = refusal(api, path, repetition_detection=detection | {"min_count": 1})
    assert "repetition_detection.min_count" in error["message"]
    assert refusal(api, path, repetition_detection={"max_pattern_size": 10**9, "min_count": 2})["code"] is None
