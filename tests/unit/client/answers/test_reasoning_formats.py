"""Reasoning split off from answers: markers of every format, in answers that arrive in any pieces."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from answer_checks import count_searched, pieces_of, split
from hypothesis import given
from hypothesis import strategies as st

from eagleray.client.answers.marked_reasoning import TURN_MARKER, MarkedReasoning
from eagleray.client.answers.parts import AnswerPart, Content, Reasoning
from eagleray.client.answers.plan import Undivided
from eagleray.client.answers.reasoning_formats import (
    find_reasoning_format,
    reasoning_format,
    registered_reasoning_formats,
)
from eagleray.client.text.chat_template import ChatTemplate
from eagleray.errors import ConfigError

MARKED = [format for format in registered_reasoning_formats() if isinstance(format, MarkedReasoning)]
CHATML = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"


def parts_of(name: str, prompt: str, pieces: Iterable[str]) -> list[AnswerPart]:
    parts = split(reasoning_format(name).splitter(prompt, Undivided()), pieces)
    assert all(part.text for part in parts)
    return parts


def both(name: str, prompt: str, answer: str) -> tuple[str | None, str | None]:
    """Return the reasoning and the content of an answer, which are the same however it is cut in two."""
    whole = parts_of(name, prompt, [answer])
    for cut in range(1, len(answer)):
        assert parts_of(name, prompt, [answer[:cut], answer[cut:]]) == whole, answer[:cut]
    assert parts_of(name, prompt, answer) == whole
    texts = {type(part): part.text for part in whole}
    assert len(texts) == len(whole)
    return texts.get(Reasoning), texts.get(Content)


@pytest.mark.parametrize(
    ("name", "prompt_end", "answer", "expected"),
    [
        ("qwen3", "", "<think>\nI see.\n</think>\n\nYes.", ("\nI see.\n", "\n\nYes.")),
        ("qwen3", "<think>\n", "I see.\n</think>\n\nYes.", ("I see.\n", "\n\nYes.")),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes.", (None, "Yes.")),
        ("qwen3", "", "Yes, <think> is a tag.", (None, "Yes, <think> is a tag.")),
        ("qwen3", "", "<think>\nI see.\n<tool_call>\n{", ("\nI see.\n", "<tool_call>\n{")),
        ("qwen3", "<think>\nI began ", "and go on.</think>Yes.", ("and go on.", "Yes.")),
        ("qwen3", "<think>\n\n</think>\n\nIt is ", "so.", (None, "so.")),
        ("deepseek_r1", "", "I see.\n</think>\n\nYes.", ("I see.\n", "\n\nYes.")),
        ("deepseek_r1", "", "<think>I see.</think>Yes.", ("I see.", "Yes.")),
        ("deepseek_r1", "", "I see, and", ("I see, and", None)),
        ("deepseek_r1", "</think>", "Yes.", (None, "Yes.")),
        ("deepseek_v3", "<think>", "I see.</think>Yes.", ("I see.", "Yes.")),
        ("deepseek_v3", "</think>", "Yes.", (None, "Yes.")),
        ("deepseek_v3", "", "Yes.", (None, "Yes.")),
        ("glm45", "", "\n<think>I see. \n</think>\nYes.", ("I see.", "\nYes.")),
        ("glm47", "<think>", "I see.</think>Yes. ", ("I see.", "Yes. ")),
        ("glm45", "\n<think></think>", "\nYes.", (None, "\nYes.")),
        ("mistral", "", "[THINK]I [see].\n[/THINK]Yes.", ("I [see].", "Yes.")),
        ("mistral", "", "Yes.", (None, "Yes.")),
        ("seed_oss", "", "<seed:think>I see.</seed:think>Yes.", ("I see.", "Yes.")),
        ("kimi_k2", "", "<think>I see.</think>Yes.", ("I see.", "Yes.")),
        ("think", "", "<think>I see.", ("I see.", None)),
        ("think", "", "<think>a</think>b</think><think>c", ("a", "b</think><think>c")),
        ("think", "", "<thin", (None, "<thin")),
        ("think", "<think>", "a</thin", ("a</thin", None)),
        ("think", "", " \n", (None, " \n")),
        ("think", "", "", (None, None)),
    ],
)
def test_answer_is_split_as_its_format_says(name, prompt_end, answer, expected):
    assert both(name, CHATML + prompt_end, answer) == expected


@pytest.mark.parametrize("end", ["<|im_end|>\n<|im_start|>assistant\n", "[/INST]", "<｜Assistant｜>", "<end_of_turn>"])
def test_marker_in_an_earlier_turn_begins_no_reasoning(end):
    format = reasoning_format("qwen3")
    assert format.begins_reasoning("Explain <think>")
    assert not format.begins_reasoning("Explain <think>" + end)
    assert format.begins_reasoning("Explain <think>" + end + "<think>\n")


@given(
    st.sampled_from(MARKED),
    st.text(alphabet="<>/[]thinkTHINK \n", max_size=12),
    st.text(alphabet="<>/[]thinkTHINK \n", max_size=12),
    st.booleans(),
    st.data(),
)
def test_parts_do_not_depend_on_the_pieces(format, reasoning, content, is_open, data):
    prompt = CHATML + (format.start if is_open else "")
    answer = ("" if is_open else format.start) + reasoning + format.end + content
    whole = parts_of(format.name, prompt, [answer])
    cuts = data.draw(st.sets(st.integers(0, len(answer))))
    assert parts_of(format.name, prompt, pieces_of(answer, cuts)) == whole
    texts = {type(part): part.text for part in whole}
    if format.end not in reasoning + format.end[:-1] and not reasoning.lstrip().startswith(format.start):
        assert texts.get(Reasoning, "") == (reasoning.rstrip() if format.strips_end else reasoning)
        assert texts.get(Content, "") == content


@pytest.mark.parametrize("format", MARKED, ids=lambda format: format.name)
def test_long_white_space_in_characters_is_searched_once(format, monkeypatch):
    space = " \n" * 1000
    answer = f"{space}{format.start}I{space}see.{space}{format.end}Yes."
    searched = count_searched(monkeypatch)
    whole = parts_of(format.name, CHATML, answer)
    assert whole == [Reasoning(f"I{space}see." + ("" if format.strips_end else space)), Content("Yes.")]
    assert sum(searched) < (len(format.end) + 2) * len(answer)


TURNS = "{% for m in messages %}{% if m.role == 'user' %}USER{% else %}ASSISTANT{% endif %}{% endfor %}"
CHATML_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
TEMPLATES = {
    "qwen3": (
        CHATML_TURN,
        "<|im_start|>assistant\n<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}<|im_end|>\n",
        "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
    ),
    "qwen3 that always thinks": (
        CHATML_TURN,
        "<|im_start|>assistant\n<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}<|im_end|>\n",
        "<|im_start|>assistant\n<think>\n",
    ),
    "deepseek_r1": (
        "<｜User｜>{{ m.content }}",
        "<｜Assistant｜><think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}<｜end▁of▁sentence｜>",
        "<｜Assistant｜><think>\n",
    ),
    "deepseek_v3": (
        "<｜User｜>{{ m.content }}",
        "<｜Assistant｜><think>{{ m.reasoning_content }}</think>{{ m.content }}<｜end▁of▁sentence｜>",
        "<｜Assistant｜>{% if (thinking or enable_thinking) is false %}</think>{% else %}<think>{% endif %}",
    ),
    "glm45": (
        "[gMASK]<sop><|user|>\n{{ m.content }}<|observation|>",
        "<|assistant|>\n<think>{{ m.reasoning_content }}</think>\n{{ m.content }}<|user|>",
        "<|assistant|>{% if enable_thinking is false %}\n<think></think>{% endif %}",
    ),
    "kimi_k2": (
        "<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|><think>{{ m.reasoning_content }}</think>{{ m.content }}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>{% if enable_thinking is false %}<think></think>{% endif %}",
    ),
    "mistral": (
        "[INST]{{ m.content }}[/INST]",
        "[THINK]{{ m.reasoning_content }}[/THINK]{{ m.content }}</s>",
        "",
    ),
    "seed_oss": (
        "<seed:bos>user\n{{ m.content }}<seed:eos>",
        "<seed:bos>assistant\n<seed:think>{{ m.reasoning_content }}</seed:think>{{ m.content }}<seed:eos>",
        "<seed:bos>assistant\n{% if enable_thinking is false %}<seed:think></seed:think>{% endif %}",
    ),
}
"""The forms of published chat templates, by format: a user's turn, an assistant's, and the end of a prompt."""


def chat_template(name: str) -> str:
    user, assistant, begin = TEMPLATES[name]
    turns = TURNS.replace("USER", user).replace("ASSISTANT", assistant)
    return turns + "{% if add_generation_prompt %}" + begin + "{% endif %}"


def render(template: str, messages: list[dict[str, str]], **variables: object) -> str:
    is_prompt = messages[-1]["role"] == "user"
    options = dict.fromkeys(("tools", "documents"), None) | {"continue_final_message": False}
    return ChatTemplate({"default": template}, {}).render(
        messages, add_generation_prompt=is_prompt, chat_template_kwargs=variables, **options
    )


USER = {"role": "user", "content": "What are <think> and [THINK]?"}
ANSWER = {"role": "assistant", "reasoning_content": "I see <a> tag.", "content": "They are [tags]."}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answer_that_a_template_writes_comes_back(name):
    template = chat_template(name)
    format = find_reasoning_format(template)
    assert format is not None
    assert format.name == name.split()[0]
    prompt = render(template, [USER])
    answer = render(template, [USER, ANSWER]).removeprefix(prompt)
    reasoning, content = both(format.name, prompt, TURN_MARKER.split(answer)[0])
    assert reasoning is not None
    assert content is not None
    assert (reasoning.strip(), content.strip()) == (ANSWER["reasoning_content"], ANSWER["content"])


@pytest.mark.parametrize("name", [name for name, parts in TEMPLATES.items() if "enable_thinking" in parts[2]])
def test_answer_to_a_prompt_without_thinking_is_content(name):
    prompt = render(chat_template(name), [USER], enable_thinking=False)
    assert both(name, prompt, "They are tags.") == (None, "They are tags.")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|start_header_id|>assistant<|end_header_id|>{{ content.split('</think>')[-1] }}", "think"),
        ("<｜Assistant｜>{{ content.split('</think>')[-1] }}", "think"),  # DeepSeek-R1-0528
        ("<｜Assistant｜>{{ content }}<｜end▁of▁sentence｜>", None),  # DeepSeek-V3-0324
        (CHATML_TURN, None),
    ],
)
def test_other_template_has_the_general_format_or_none(template, name):
    found = find_reasoning_format(template)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("Yes.", (None, "Yes.")), ("<think>\nI see.\n</think>\n\nYes.", ("\nI see.\n", "\n\nYes."))],
)
def test_answer_is_reasoning_only_after_its_marker_if_the_template_never_writes_it(answer, expected):
    template = "<｜User｜>{{ messages[0].content }}<｜Assistant｜>{% set removed = '</think>' %}"
    found = find_reasoning_format(template)
    assert found is not None
    assert both(found.name, render(template, [USER]), answer) == expected


def test_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"no format 'qwen4'; use auto, none or one of .*deepseek_r1, .*qwen3"):
        reasoning_format("qwen4")
