"""Messages of a conversation in the form that chat templates expect. Pure.

The rules are those of transformers, which passes messages as they are, and of vLLM's servers, which mend what templates
cannot use: arguments of tool calls that are JSON in a text, and contents in parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from eagleray.client.text.template_form import MessageForm
from eagleray.errors import InvalidRequest

MAX_ROLE_CHARS = 64
REASONING_NAMES = ("reasoning", "reasoning_content", "thinking")
"""Names of an assistant's reasoning: of OpenAI's newer clients, of most templates, and of gpt-oss's."""


def check_messages(messages: Sequence[Any]) -> None:
    """Raise `InvalidRequest` for the first message that no template could show. Other keys are not looked at."""
    if not messages:
        raise InvalidRequest("the conversation is empty, but it needs at least one message", param="messages")
    for index, message in enumerate(messages):
        if not _is_plain(message):
            _check_message(message, f"messages[{index}]")


def text_entry(entries: Mapping[str, Any], name: str, path: str) -> str:
    """Return the text under `name` in the part of a conversation at `path`. Raises `InvalidRequest`."""
    value = entries.get(name)
    if not isinstance(value, str):
        raise wrong_entry(f"{path}.{name}", "must be a text" if name in entries else "is missing")
    return value


def wrong_entry(path: str, what: str) -> InvalidRequest:
    """Return the error for the part of a conversation at `path`; `what` follows its name."""
    return InvalidRequest(f"`{path}` {what}", param=path)


def _is_plain(message: Any) -> bool:
    """Whether a message has a role of usual length and a text, and nothing else. Most messages are like that."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("content")) is str
        and type(role := message.get("role")) is str
        and 0 < len(role) <= MAX_ROLE_CHARS
    )


def template_message(message: Mapping[str, Any], form: MessageForm) -> dict[str, Any]:
    """Return a copy of a checked message in this form, without keys that are null, except an assistant's content."""
    role, content = message["role"], message.get("content")
    if len(message) == 2 and type(content) is str and role != "developer" and not form.wraps_texts:
        return {"role": role, "content": content}
    plain = {name: value for name, value in message.items() if value is not None}
    if role == "assistant":
        _complete_answer(plain, has_text_arguments=form.has_text_arguments)
        if not content and "content" in message and "tool_calls" in plain:
            # Clients send both null and an empty text. Some templates show calls beside null only.
            content = plain["content"] = None if form.tests_null_content else ""
        elif content is None and "content" in message:
            plain["content"] = None
    if content is None and form.has_empty_content:
        content = plain["content"] = ""
    if role == "developer" and not form.knows_developer:
        plain["role"] = "system"
    if isinstance(content, str) and form.wraps_texts:
        plain["content"] = [{"type": "text", "text": content}]
    elif content is not None and not isinstance(content, str):
        plain["content"] = _parts(content) if form.keeps_parts else "".join(part["text"] for part in _parts(content))
    if form.joins_reasoning and has_call_with_reasoning_and_content(plain) and isinstance(plain["content"], str):
        joined = f"{plain['thinking']}\n\n{plain['content']}"
        plain |= dict.fromkeys(REASONING_NAMES, joined) | {"content": ""}
    return plain


def template_tools(tools: Sequence[Mapping[str, Any]] | None, form: MessageForm) -> Sequence[Mapping[str, Any]] | None:
    """Return the tools of a request in this form."""
    if not tools or not form.has_descriptions:
        return tools
    return [_with_description(tool) if lacks_description(tool) else tool for tool in tools]


def lacks_description(tool: Mapping[str, Any]) -> bool:
    """Whether a tool is a function without a description, which OpenAI's API allows."""
    function = tool.get("function")
    return isinstance(function, Mapping) and function.get("description") is None


def _with_description(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "description": ""}}


def has_call_with_reasoning_and_content(message: Mapping[str, Any]) -> bool:
    """Whether an assistant's message has tool calls, reasoning and a text beside them."""
    has_reasoning = any(message.get(name) for name in REASONING_NAMES)
    return bool(message.get("tool_calls") and message.get("content") and has_reasoning)


def _parts(content: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the parts of a content as objects with a type. Clients may send texts instead, or leave the type out."""
    parts = ({"text": part} if isinstance(part, str) else part for part in content)
    return [{"type": "text", **part} for part in parts]


def _complete_answer(message: dict[str, Any], *, has_text_arguments: bool) -> None:
    """Give the reasoning of an assistant's message all of its names, and the arguments of its calls their form."""
    reasoning = next((message[name] for name in REASONING_NAMES if name in message), None)
    if reasoning is not None:
        message |= {name: message.get(name, reasoning) for name in REASONING_NAMES}
    calls = message.get("tool_calls")
    if calls:
        convert = _as_text if has_text_arguments else _as_object
        message["tool_calls"] = [_with_arguments(call, convert) for call in calls]
    elif calls is not None:
        del message["tool_calls"]


def _with_arguments(call: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a tool call with converted arguments, and with the type that some templates show."""
    function = call["function"]
    return {"type": "function", **call, "function": {**function, "arguments": convert(function.get("arguments"))}}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _as_object(given: Any) -> dict[str, Any]:
    """Return arguments as an object, which is empty if they are no JSON object.

    The model itself may have written them, and after a refusal such a conversation could never be continued.
    """
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            return {}
    return dict(given) if isinstance(given, Mapping) else {}


def _check_message(message: Any, path: str) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f'`{path}`: a message is a mapping with a "role" and a "content", but this is {message!r:.100}', param=path
        )
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE_CHARS:
        wrong = "is missing" if role is None else f"must be a text of 1 to {MAX_ROLE_CHARS} characters"
        raise wrong_entry(f"{path}.role", f"{wrong}: such as system, user, assistant or tool")
    content = message.get("content")
    if content is None and role in ("system", "developer", "user", "tool"):
        wrong = "is null" if "content" in message else "is missing"
        raise wrong_entry(f"{path}.content", f"{wrong}, but a message of the role {role} needs a text")
    if content is not None and not isinstance(content, str):
        _check_parts(content, f"{path}.content")
    if role == "assistant":
        _check_calls(message.get("tool_calls"), f"{path}.tool_calls")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise wrong_entry(f"{path}.name", "must be a text")


def _check_parts(content: Any, path: str) -> None:
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise wrong_entry(path, f"must be a text or a list of parts, but it is of the type {type(content).__name__}")
    for index, part in enumerate(content):
        if isinstance(part, str):
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidRequest(
                f'`{path}[{index}]` is a part of the type {kind!r:.40}, but only {{"type": "text", "text": "..."}} is '
                "supported",
                param=f"{path}[{index}].type",
            )
        if not isinstance(text, str):
            raise wrong_entry(f"{path}[{index}].text", 'must be a text, as in {"type": "text", "text": "..."}')


def _check_calls(calls: Any, path: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise wrong_entry(path, "must be a list of calls")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise wrong_entry(
                f"{path}[{index}]",
                'must be a call such as {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}',
            )
