from __future__ import annotations

import pytest
from client_tokenizers import CHATML, write_checkpoint
from transformers import AutoTokenizer

from eagleray.client.text.chat_template import ChatTemplate
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.errors import InvalidRequest

MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "  Grüße, <b>world</b> & all  "},
    {"role": "assistant", "content": " Hello", "tool_calls": None},
]
STRICT = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- set state = namespace(count=0) %}
{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if loop.index0 > 3 %}{% break %}{% endif %}
    {%- set state.count = state.count + 1 %}
    {{- '[' + message['role'] + '] ' + message['content'] | trim + eos_token }}
{% endfor %}
{{- state.count }}{% if add_generation_prompt %}[assistant]{% endif %}
"""
TOOLS = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}
{%- for document in documents or [] %}{{ document.title }}{% endfor %}
{%- for message in messages %}
    {%- generation %}{{ message.content }}{% endgeneration %}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}<no think>{% endif %}
"""
TOOL = {"type": "function", "function": {"name": "größe", "parameters": {"a": "<'\">", "b": [1, None, True]}}}


def both(tmp_path, template):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    directory = write_checkpoint(tmp_path, tokenizer_config=config)
    return Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)


def render(template, messages=MESSAGES, **options):
    templates = template if isinstance(template, dict) else {"default": template}
    defaults = {
        "add_generation_prompt": False,
        "continue_final_message": False,
        "tools": None,
        "documents": None,
        "chat_template_kwargs": None,
    }
    return ChatTemplate(templates, {"eos_token": "</s>"}).render(messages, **(defaults | options))


@pytest.mark.parametrize("template", [CHATML, STRICT, TOOLS], ids=["chatml", "strict", "tools"])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {
            "add_generation_prompt": True,
            "tools": [TOOL],
            "documents": [{"title": "a", "text": "b"}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ],
    ids=["prompt", "no prompt", "continue", "everything"],
)
def test_render_options_equal_transformers(template, options, tmp_path):
    ours, theirs = both(tmp_path, template)
    theirs_options = dict(options)
    theirs_options |= theirs_options.pop("chat_template_kwargs", {})
    assert ours.apply_chat_template(MESSAGES, **options) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, **theirs_options
    )


@pytest.mark.parametrize("text", ["Hello", "Hello ", " Hello  \n", "end CONTINUE", "mes"])
@pytest.mark.parametrize("template", [CHATML, STRICT], ids=["chatml", "strict"])
def test_render_continued_message_equals_transformers(template, text, tmp_path):
    ours, theirs = both(tmp_path, template)
    messages = [{"role": "user", "content": "mes"}, {"role": "assistant", "content": text}]
    rendered = ours.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered.rstrip().endswith(text.strip())
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)


def test_render_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


def test_render_with_tools_uses_tool_template():
    templates = {"default": "plain", "tool_use": "tools"}
    assert render(templates) == "plain"
    assert render(templates, tools=[TOOL]) == "tools"


def test_render_leaves_messages_unchanged():
    message = {"role": "assistant", "content": "x"}
    render("{{ messages[0].content }}", [message], continue_final_message=True)
    assert message == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (STRICT, [{"role": "assistant", "content": "x"}], "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", MESSAGES, "no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", MESSAGES, "TypeError"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "unsafe"),
        ("{{ messages.append(1) }}", MESSAGES, "is unsafe"),
        ("line\n{% if %}", MESSAGES, "error in line 2"),
        ({}, MESSAGES, "has no chat template: give one with the option `chat_template`"),
        ({"rag": "x"}, MESSAGES, "it has 'rag' only"),
        (CHATML, [], "at least one message"),
        (CHATML, ["hi"], "a message is a mapping"),
        (CHATML, [{"content": "hi"}], r"`messages\[0\].role` is missing"),
        (CHATML, [{"role": "user", "content": 5}], "a text or a list of parts"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
        (CHATML, [{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text` must be"),
        (CHATML, [{"role": "user", "content": [5]}], "'int'"),
    ],
)
def test_render_invalid_template_or_message_raises(template, messages, expected):
    with pytest.raises(InvalidRequest, match=expected) as raised:
        render(template, messages)
    assert raised.value.param.startswith("messages")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "set one of them"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages'"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "'add_generation_prompt'"),
    ],
)
def test_render_contradicting_options_raise(options, expected):
    with pytest.raises(InvalidRequest, match=expected):
        render(CHATML, **options)


def test_render_hidden_final_message_cannot_be_continued():
    for template in ("nothing", "{{ messages[0].content }}"):
        with pytest.raises(InvalidRequest, match="cannot be continued"):
            render(template, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="has no content"):
        render(CHATML, [{"role": "assistant"}], continue_final_message=True)


def test_render_strftime_now_returns_date():
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2026-01-01")
