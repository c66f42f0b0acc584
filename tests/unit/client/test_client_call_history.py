"""Tool calls and results of earlier messages, for templates in the forms of published ones."""

from __future__ import annotations

import copy

import pytest

from eagleray.client.text.chat_template import ChatTemplate

# Joins the arguments as a text, and shows calls beside a null content only.
DEEPSEEK_V3 = """
{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<call>' + tool['type'] + '<sep>' + tool['function']['name'] + tool['function']['arguments'] }}
        {%- endfor %}
    {%- elif message['role'] == 'tool' %}{{ '<out>' + message['content'] }}
    {%- else %}{{ '<' + message['role'] + '>' + message['content'] }}
    {%- endif %}
{%- endfor %}"""

# A content of any type but a text is shown as Jinja writes it.
GLM_45 = """
{%- macro visible_text(content) %}{{ content }}{% endmacro %}
{%- for m in messages %}{{ '<' + m.role + '>' }}{% set content = visible_text(m.content) %}
    {%- if m.reasoning_content is string %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
    {{- content.strip() }}
    {%- for tc in m.tool_calls or [] %}{% set tc = tc.function %}{{ '<call>' + tc.name }}
        {%- for k, v in tc.arguments.items() %}<k>{{ k }}<v>{{ v | tojson if v is not string else v }}{% endfor %}
    {%- endfor %}
{%- endfor %}"""

# Shows ids in place of names.
KIMI_K2 = """
{%- for message in messages %}{{ '<' + (message.get('name') or message['role']) + '>' }}
    {%- if message['role'] == 'tool' %}{{ '## Return of ' + message.tool_call_id + ':' }}{% endif %}
    {%- set c = message.get('content') %}{% if c is not none %}{{ c }}{% endif %}
    {%- for tool_call in message.get('tool_calls') or [] %}
        {{- '<|tool_call_begin|>' + tool_call['id'] + '<|tool_call_argument_begin|>' }}
        {%- if tool_call['function']['arguments'] is string %}{{ tool_call['function']['arguments'] }}
        {%- else %}{{ tool_call['function']['arguments'] | tojson }}{% endif %}
    {%- endfor %}
{%- endfor %}"""

# One call in a message, whose name is that of the results behind it; reasoning or content beside it, not both.
GPT_OSS = """
{%- set last = namespace(name=none) %}
{%- for tool in tools or [] %}{{ '// ' + tool.function.description + '\n' }}{% endfor %}
{%- for message in messages %}
    {%- if 'content' in message and '<|channel|>' in message.content %}{{ raise_exception('tags') }}{% endif %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}{{ raise_exception('both') }}
        {%- elif message.content or message.thinking %}{{ '<analysis>' + (message.content or message.thinking) }}
        {%- endif %}
        {{- '<call>' + call.name + (call.arguments | tojson) }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'tool' %}{{ '<' + last.name + '>' + (message.content | tojson) }}
    {%- else %}{{ '<' + message.role + '>' + message.content }}
    {%- endif %}
{%- endfor %}"""


def call(call_id, name, arguments):
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def asks(*calls, **further):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **further}


def result(call_id, content, **further):
    return {"role": "tool", "tool_call_id": call_id, "content": content, **further}


def render(template, messages, tools=None):
    before = copy.deepcopy(messages)
    text = ChatTemplate({"default": template}, {}).render(
        messages,
        add_generation_prompt=False,
        continue_final_message=False,
        tools=tools,
        documents=None,
        chat_template_kwargs=None,
    )
    assert messages == before
    return text


TIME = call("call_1", "time", "{}")
RAIN = call("call_2", "rain", '{"city": "Köln", "days": 2}')


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (DEEPSEEK_V3, '<call>function<sep>rain{"city": "Köln", "days": 2}'),
        (GLM_45, "<assistant><call>rain<k>city<v>Köln<k>days<v>2"),
        (GPT_OSS, '<call>rain{"city": "Köln", "days": 2}'),
    ],
)
def test_render_calls_beside_an_empty_content_shows_them_alone(template, content, expected):
    assert render(template, [asks(RAIN, content=content)]) == expected


def test_render_template_that_prints_arguments_gets_a_text():
    template = "{% for c in messages[0].tool_calls %}{{ c.function.arguments }}{% endfor %}"
    assert render(template, [asks(RAIN, call("1", "f", {"a": "ö"}))]) == '{"city": "Köln", "days": 2}{"a": "ö"}'
    tested = template.replace("}}", "}}{% if c.function.arguments is mapping %}!{% endif %}")
    assert render(tested, [asks(call("1", "f", '{"a": 1}'))]) == "{'a': 1}!"


def test_render_results_have_the_names_of_their_functions():
    template = "{% for m in messages if m.role == 'tool' %}{{ m.name }} {% endfor %}"
    results = [result("call_2", "wet"), result("call_1", "12:00"), result("call_1", "", name="own"), result("?", "")]
    assert render(template, [asks(TIME, RAIN), *results]) == "time own rain  "


def test_render_ids_that_kimi_does_not_write_are_numbered_over_the_conversation():
    messages = [
        asks(TIME, RAIN, content="Wait."),
        result("call_2", "wet"),
        result("call_1", "12:00"),
        asks(call("functions.time:0", "time", {})),
        result("functions.time:0", "13:00"),
        result("call_9", "lost"),
    ]
    assert render(KIMI_K2, messages) == (
        "<assistant>Wait.<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}"
        '<|tool_call_begin|>functions.rain:1<|tool_call_argument_begin|>{"city": "Köln", "days": 2}'
        "<time>## Return of functions.time:0:12:00<rain>## Return of functions.rain:1:wet"
        "<assistant><|tool_call_begin|>functions.time:2<|tool_call_argument_begin|>{}"
        "<time>## Return of functions.time:2:13:00<tool>## Return of call_9:lost"
    )


def test_render_ids_that_kimi_wrote_stay():
    messages = [asks(call("functions.f:7", "f", {})), result("functions.f:7", "x")]
    text = render(KIMI_K2, messages)
    assert "<|tool_call_begin|>functions.f:7<" in text and "## Return of functions.f:7:x" in text


def test_render_several_calls_for_a_template_of_one_are_separate_messages():
    messages = [
        {"role": "user", "content": "?"},
        asks(TIME, RAIN, call("call_3", "wait", {}), reasoning="Both."),
        result("call_2", "wet"),
        result("call_1", "12:00"),
        result("call_9", "lost"),
        {"role": "assistant", "content": "Wet."},
    ]
    assert render(GPT_OSS, messages) == (
        '<user>?<analysis>Both.<call>time{}<time>"12:00"<call>rain{"city": "Köln", "days": 2}<rain>"wet"'
        '<call>wait{}<wait>"lost"<assistant>Wet.'
    )


def test_render_results_without_ids_stay_behind_all_calls():
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    calls = [{"function": {"name": name, "arguments": {}}} for name in "fg"]
    assert render(GPT_OSS, [asks(*calls), *results]) == '<call>f{}<call>g{}<g>"1"<g>"2"'


def test_render_calls_of_other_roles_are_passed_as_they_are():
    messages = [{"role": "user", "content": "?", "tool_calls": 5}, asks(TIME)]
    assert (
        render(
            "{% for m in messages %}{{ m.tool_calls | length if m.role == 'assistant' else m.tool_calls }}{% endfor %}",
            messages,
        )
        == "51"
    )


def test_render_template_that_loops_over_calls_gets_them_in_one_message():
    template = (
        "{% for m in messages %}{{ m.tool_calls[0].id }}:{% for c in m.tool_calls %}{{ c.id }} {% endfor %}{% endfor %}"
    )
    assert render(template, [asks(TIME, RAIN)]) == "call_1:call_1 call_2 "


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_render_content_and_reasoning_beside_a_call_are_joined_for_a_template_that_refuses_both(name):
    message = asks(TIME, content="Let me look.", **{name: "The time?"})
    assert render(GPT_OSS, [message]) == "<analysis>The time?\n\nLet me look.<call>time{}"
    assert render(GLM_45, [message]) == "<assistant><think>The time?</think>Let me look.<call>time"


@pytest.mark.parametrize("description", [{}, {"description": None}])
def test_render_tool_without_description_has_an_empty_one_for_a_template_that_needs_it(description):
    tools = [{"type": "function", "function": {"name": "f", **description}}]
    assert render(GPT_OSS, [asks(TIME)], tools) == "// \n<call>time{}"
    assert render("{{ tools[0] | tojson }}", [asks(TIME)], tools).count("description") == len(description)
