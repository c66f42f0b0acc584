"""Reasoning on /v1/chat/completions: split off from the content, and ended by a budget."""

from __future__ import annotations

import json

import pytest
from server_fakes import serving, write_checkpoint
from tokenizers import AddedToken, Tokenizer

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A checkpoint whose tokenizer has the markers of reasoning, and whose template begins it."""
    directory = write_checkpoint(tmp_path_factory.mktemp("thinker"))
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_str(path.read_text())
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in ("<think>", "</think>")])
    path.write_text(tokenizer.to_str())
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def api(thinker):
    with serving(thinker) as api:
        api.join(max_model_len=1024)
        yield api


def say(api, text):
    """Have the engine answer with this text."""
    api.speech = api.client.tokenizer.encode(text, add_special_tokens=False)


def answer(api, **body):
    response = api.post(PATH, {"messages": [USER], **body})
    assert response.status_code == 200, response.text
    return response.json()


def message_of(api, **body):
    """Return the message of an answer, after checking that its stream adds up to it."""
    (choice,) = answer(api, **body)["choices"]
    message = choice["message"]
    names = ("content", "reasoning", "reasoning_content")
    joined = dict.fromkeys(names)
    for event in api.events(PATH, {"messages": [USER], **body}):
        for delta in (choice["delta"] for choice in event["choices"]):
            joined |= {name: (joined[name] or "") + delta[name] for name in names if delta.get(name) is not None}
    assert (joined["content"] or None) == message["content"]
    assert joined["reasoning"] == joined["reasoning_content"] == message.get("reasoning")
    return message


def test_chat_reasoning_is_not_content(api):
    say(api, "I see.\n</think>\n\nYes.")
    message = message_of(api)
    assert (message["reasoning"], message["reasoning_content"]) == ("I see.\n", "I see.\n")
    assert message["content"] == "\n\nYes."


def test_chat_reasoning_that_is_cut_off_leaves_no_content(api):
    say(api, "I see. Then I")
    (choice,) = answer(api, max_tokens=4)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"].startswith("I")


def test_chat_thinking_that_is_off_makes_all_content(api):
    say(api, "Yes.")
    message = message_of(api, chat_template_kwargs={"enable_thinking": False})
    assert (message["reasoning"], message["content"]) == (None, "Yes.")
    assert message_of(api, reasoning_effort="none")["content"] == "Yes."


def test_chat_reasoning_that_is_not_included_is_left_out(api):
    say(api, "I see.</think>Yes.")
    message = message_of(api, include_reasoning=False)
    assert (message["reasoning"], message["content"]) == (None, "Yes.")


def test_chat_budget_and_grammar_reach_the_engine_with_the_markers(api):
    say(api, "I see.</think>{}")
    end = api.client.tokenizer.token_id("</think>")
    answer(api, thinking_token_budget=0, response_format={"type": "json_object"})
    sampling = api.engine.requests[-1].sampling
    assert (sampling.thinking.end, sampling.thinking.budget, sampling.thinking.is_open) == ((end,), 0, True)
    assert sampling.grammar is not None
    answer(api, thinking_token_budget=-1)
    assert api.engine.requests[-1].sampling.thinking is None
    for budget, expected in ((-2, "at least -1"), ("many", "thinking_token_budget")):
        response = api.post(PATH, {"messages": [USER], "thinking_token_budget": budget})
        assert response.status_code == 400
        assert expected in response.json()["error"]["message"]


def test_chat_budget_of_a_model_that_shows_no_reasoning_is_refused(checkpoint):
    with serving(checkpoint) as api:
        for path in (PATH, "/v1/completions"):
            prompt = {"messages": [USER]} if path == PATH else {"prompt": "hello"}
            response = api.post(path, prompt | {"thinking_token_budget": 5})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking_token_budget")


def test_chat_parser_that_is_off_leaves_reasoning_in_the_content(thinker):
    with serving(thinker, reasoning_parser="none") as api:
        api.join(max_model_len=1024)
        say(api, "I see.</think>Yes.")
        assert answer(api)["choices"][0]["message"]["content"] == "I see.</think>Yes."
        answer(api, response_format={"type": "json_object"})
        assert api.engine.requests[-1].sampling.thinking is None
        assert json.loads(api.engine.requests[-1].sampling.grammar.source) == {"type": "object"}
