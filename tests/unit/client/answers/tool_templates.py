"""Chat templates that write calls in the forms of published ones, without their instructions."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

from eagleray.client.text.chat_template import ChatTemplate

QWEN = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls %}
        {%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{% endif %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

HERMES = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls %}
        {{- '\\n<tool_call>\\n{ "arguments": ' + call.function.arguments | tojson }}
        {{- ', "name": "' + call.function.name + '"}\\n</tool_call> ' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

QWEN3_CODER = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {%- set is_json = value is mapping or (value is sequence and value is not string) %}
            {{- '<parameter=' + name + '>\\n' }}
            {{- (value | tojson if is_json else value | string) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA = """
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content or '') }}
    {%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
        {%- if not loop.last %}{{- '; ' }}{% endif %}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

MISTRAL = """
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}{% else %}
        {{- message.content or '' }}
        {%- if message.tool_calls %}
            {{- '[TOOL_CALLS] [' }}
            {%- for call in message.tool_calls %}
                {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- ']' }}
        {%- endif %}
        {{- '</s>' }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL_NAMED = """
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}{% else %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id }}
            {{- '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- '</s>' }}
    {%- endif %}
{%- endfor %}
"""


DEEPSEEK_V3 = """
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}{% else %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
"""

DEEPSEEK_V31 = """
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content + '<｜Assistant｜></think>' }}{% else %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
            {{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
"""

GLM_45 = """
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + (message.content or '') }}
    {%- for call in message.tool_calls %}
        {{- '\\n<tool_call>' + call.function.name + '\\n' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
            {{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
        {%- endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}
"""

GLM_47 = """
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + (message.content or '') }}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>' + call.function.name }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<arg_key>' + key + '</arg_key><arg_value>' }}
            {{- (value if value is string else value | tojson) + '</arg_value>' }}
        {%- endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""

KIMI_K2 = """
{%- for message in messages %}
    {{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + (message.content or '') }}
    {%- for call in message.tool_calls %}
        {{- '<|tool_calls_section_begin|>' if loop.first }}
        {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson }}
        {{- '<|tool_call_end|>' + ('<|tool_calls_section_end|>' if loop.last else '') }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""


class Family(NamedTuple):
    """Models that share a format and a template."""

    tool_format: str
    template: str
    end: str
    """Text after an answer."""

    def write(self, content: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
        """Return an answer with calls, as the template writes it."""
        prompt = self._render([], add_generation_prompt=True)
        tool_calls = [
            {
                "id": f"call{index:05}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
        answer = {"role": "assistant", "content": content, "tool_calls": tool_calls}
        return self._render([answer]).removeprefix(prompt).removesuffix(self.end)

    def _render(self, answers: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        return _compiled(self.template).render(
            [{"role": "user", "content": "Hi"}, *answers],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=False,
            tools=None,
            documents=None,
            chat_template_kwargs=None,
        )


@functools.cache
def _compiled(template: str) -> ChatTemplate:
    return ChatTemplate({"default": template}, {})


FAMILIES = {
    "hermes": Family("hermes", HERMES, "<|im_end|>\n"),
    "qwen": Family("hermes", QWEN, "<|im_end|>\n"),
    "qwen3_coder": Family("qwen3_coder", QWEN3_CODER, "<|im_end|>\n"),
    "llama": Family("llama3_json", LLAMA, "<|eot_id|>"),
    "deepseek_v3": Family("deepseek_v3", DEEPSEEK_V3, "<｜end▁of▁sentence｜>"),
    "deepseek_v31": Family("deepseek_v31", DEEPSEEK_V31, "<｜end▁of▁sentence｜>"),
    "glm45": Family("glm45", GLM_45, ""),
    "glm47": Family("glm45", GLM_47, ""),
    "kimi_k2": Family("kimi_k2", KIMI_K2, "<|im_end|>"),
    "mistral": Family("mistral", MISTRAL, "</s>"),
    "mistral_named": Family("mistral", MISTRAL_NAMED, "</s>"),
}
