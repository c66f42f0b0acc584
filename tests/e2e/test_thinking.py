"""Thinking of a model in a conversation: ended by budgets, and followed by answers in JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

import eagleray
from eagleray import LLM, SamplingParams
from eagleray.messages.structured_outputs import StructuredOutputsParams

EMBEDDED = Path(eagleray.__file__).parent / "demo_model"
MARKERS = ("<think>", "</think>")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TEMPLATE = "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n{# </think> #}"
QUESTION = [{"role": "user", "content": "What is an engine?"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """The embedded model, whose last two tokens are the markers of reasoning that its prompt begins."""
    directory = tmp_path_factory.mktemp("thinker")
    shutil.copytree(EMBEDDED, directory, dirs_exist_ok=True)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    replaced = sorted(vocab, key=vocab.get)[-len(MARKERS) :]
    content["model"]["merges"] = [merge for merge in content["model"]["merges"] if "".join(merge) not in replaced]
    for token in replaced:
        del vocab[token]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    path.write_text(tokenizer.to_str())
    template = directory / "thinking.jinja"
    template.write_text(
        "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n{# </think> #}"
    )
    with LLM(str(directory), chat_template=str(template), num_threads=1, max_model_len=400) as llm:
        yield llm


def ask(llm, **params):
    (output,) = llm.chat(QUESTION, SamplingParams(temperature=1, seed=5, **params), use_tqdm=False)
    return output.outputs


@pytest.mark.parametrize("budget", [0, 1, 6])
def test_chat_answer_after_thinking_follows_its_schema(llm, budget):
    constraint = StructuredOutputsParams(json=SCHEMA)
    answers = ask(llm, n=4, thinking_token_budget=budget, structured_outputs=constraint, max_tokens=100)
    end = llm.get_tokenizer().token_id("</think>")
    for answer in answers:
        assert answer.finish_reason == "stop"
        assert json.loads(answer.content)["size"] in range(100)
        assert answer.text == (answer.reasoning or "") + "</think>" + answer.content
        assert answer.token_ids.index(end) <= budget
    again = ask(llm, n=4, thinking_token_budget=budget, structured_outputs=constraint, max_tokens=100)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]


def test_chat_thinking_that_reaches_max_tokens_leaves_no_content(llm):
    (answer,) = ask(llm, structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=20)
    assert (answer.finish_reason, answer.content) == ("length", None)
    assert answer.reasoning == answer.text
    assert len(answer.token_ids) == 20


def test_generate_text_that_is_not_divided_follows_its_schema_from_the_beginning(llm):
    constraint = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=1, seed=5, structured_outputs=constraint, max_tokens=100)
    prompt = "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert json.loads(output.outputs[0].text)["size"] in range(100)
