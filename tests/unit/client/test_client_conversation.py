"""Messages with tools, reasoning and other keys, against transformers where it takes them as they are."""

from __future__ import annotations

import copy

import pytest
from client_tokenizers import CHATML, write_checkpoint
from transformers import AutoTokenizer

from eagleray.client.text.chat_template import ChatTemplate
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.errors import InvalidRequest

# In the style of published templates for tool calls: sections for tools, calls, results and reasoning.
AGENT = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.content is not none and message.content is defined %}{{ message.content }}{% endif %}
        {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '<call>' + call.name }}
            {%- for name, value in call.arguments.items() %} {{ name }}={{ value | tojson }}{% endfor %}
            {{- '</call>' }}
        {%- endfor %}{{ '<|im_end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '<result ' + message.tool_call_id + '>' + message.content + '</result>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + message.content }}
        {%- if message.reasoning is defined %}({{ message.reasoning }}){% endif %}{{ '<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + (' ' + message.name if message.name else '') + '\n' }}
        {{- message.content + '<|im_end|>' }}{% if message.mood %}[{{ message.mood }}]{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def call(arguments, name="weather"):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie wird es in Köln?", "name": "Ann", "mood": "curious"},
    {"role": "assistant", "content": None, "tool_calls": [call({"city": "Köln", "days": 2}), call({}, "time")]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": "12:00"},
    {"role": "assistant", "content": "Rain.", "reasoning_content": "Umbrella?", "reasoning": "Umbrella?"},
    {"role": "reviewer", "content": "Fine."},
]


def both(tmp_path, template):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    directory = write_checkpoint(tmp_path, tokenizer_config=config)
    return Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)


def render(template, messages, content_format="auto"):
    return ChatTemplate({"default": template}, {}, content_format).render(
        messages,
        add_generation_prompt=False,
        continue_final_message=False,
        tools=None,
        documents=None,
        chat_template_kwargs=None,
    )


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_render_history_of_an_agent_equals_transformers(tools, tmp_path):
    ours, theirs = both(tmp_path, AGENT)
    expected = theirs.apply_chat_template(HISTORY, tools=tools, tokenize=False, add_generation_prompt=True)
    assert '<call>weather city="Köln" days=2</call><call>time</call>' in expected
    assert ours.apply_chat_template(HISTORY, tools=tools, add_generation_prompt=True) == expected


def test_render_arguments_in_a_text_are_an_object_for_the_template(tmp_path):
    ours, theirs = both(tmp_path, AGENT)
    as_sent = copy.deepcopy(HISTORY)
    as_sent[2]["tool_calls"] = [call('{"city": "Köln", "days": 2}'), call("", "time")]
    before = copy.deepcopy(as_sent)
    expected = theirs.apply_chat_template(HISTORY, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(as_sent, add_generation_prompt=True) == expected
    assert as_sent == before


@pytest.mark.parametrize("arguments", ["{broken", "[1]", "5", "null", None, [1], "[" * 100_000])
def test_render_arguments_that_are_no_object_are_empty(arguments):
    template = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    assert render(template, [{"role": "assistant", "tool_calls": [call(arguments)]}]) == "{}"


def test_render_template_that_joins_arguments_gets_a_text():
    template = "{% for call in messages[0].tool_calls %}{{ '<' + call.function.arguments + '>' }}{% endfor %}"
    calls = [call('{"a":  1}'), call({"ö": 2})]
    assert render(template, [{"role": "assistant", "content": None, "tool_calls": calls}]) == '<{"a":  1}><{"ö": 2}>'


def test_render_template_that_needs_a_content_gets_an_empty_one():
    template = "{{ '<' + messages[0].content + '>' }}{% for c in messages[0].tool_calls %}{{ EXTRA }}{% endfor %}"
    without = {"role": "assistant", "tool_calls": [call('{"a": 1}')]}
    for message in (without, without | {"content": None}):
        assert render(template.replace("EXTRA", "1"), [message]) == "<>1"
        assert render(template.replace("EXTRA", "'' + c.function.arguments"), [message]) == '<>{"a": 1}'
    with pytest.raises(InvalidRequest, match=r"'\+'|concatenate|content|NoneType"):
        render("{{ '<' + messages[0].content + 5 }}", [without])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_render_reasoning_has_both_names(name):
    template = "{{ messages[0].reasoning }} {{ messages[0].reasoning_content }}"
    assert render(template, [{"role": "assistant", "content": "x", name: "because"}]) == "because because"


def test_render_null_is_left_out_but_for_an_assistants_content():
    template = "{{ messages[0].keys() | list }}{{ messages[0].content is none }}"
    message = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": None}
    assert render(template, [message]) == "['role', 'content']True"
    assert render(template, [{"role": "assistant", "tool_calls": []}]) == "['role']False"


def test_render_developer_is_system_unless_the_template_knows_it():
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{% if messages[0].role == 'developer' %}dev{% endif %}", messages) == "dev"


LOOP = "{% for part in messages[0].content %}[{{ part.type }}:{{ part.text }}{{ part.extra }}]{% endfor %}"
EITHER = "{% set c = messages[0]['content'] %}{% if c is string %}{{ c }}{% else %}" + LOOP + "{% endif %}"
PARTS = [{"type": "text", "text": "a", "extra": "!"}, {"text": "b"}, "c"]


@pytest.mark.parametrize(
    ("template", "content_format", "content", "expected"),
    [
        ("{{ messages[0].content }}", "auto", PARTS, "abc"),
        ("{{ messages[0].content }}", "string", PARTS, "abc"),
        (LOOP, "auto", PARTS, "[text:a!][text:b][text:c]"),
        (LOOP, "openai", PARTS, "[text:a!][text:b][text:c]"),
        (LOOP, "auto", "ab", "[text:ab]"),
        (LOOP, "string", "ab", "[:][:]"),
        (EITHER, "auto", "ab", "ab"),
        (EITHER, "auto", PARTS, "[text:a!][text:b][text:c]"),
        (EITHER, "openai", "ab", "[text:ab]"),
        (EITHER, "string", PARTS, "abc"),
        ("{% set c = messages[0].content %}{% for p in c | list %}{{ p.text }};{% endfor %}", "auto", "ab", "ab;"),
        ("{% for part in messages[0].contents %}{% endfor %}{{ messages[0].content }}", "auto", PARTS, "abc"),
    ],
)
def test_render_content_has_the_form_of_the_template(template, content_format, content, expected):
    messages = [{"role": "user", "content": content}]
    assert render(template, messages, content_format) == expected
    assert PARTS == [{"type": "text", "text": "a", "extra": "!"}, {"text": "b"}, "c"]


def test_render_continued_message_in_parts_is_cut_at_its_end(tmp_path):
    template = "{% for message in messages %}<{{ message.role }}>" + LOOP.replace("[0]", "[-1]") + "</>{% endfor %}"
    ours, theirs = both(tmp_path, template.replace("messages[-1]", "message"))
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "I am"}]}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert ours.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_render_own_template_takes_the_place_of_the_models():
    template = ChatTemplate({"default": CHATML}, {})
    options = {
        "add_generation_prompt": False,
        "continue_final_message": False,
        "tools": None,
        "documents": None,
        "chat_template_kwargs": None,
    }
    assert template.render([{"role": "user", "content": "x"}], source="<{{ messages[0].content }}>", **options) == "<x>"
    with pytest.raises(InvalidRequest, match="error in line 1"):
        template.render([{"role": "user", "content": "x"}], source="{% if %}", **options)
