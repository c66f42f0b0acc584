"""The messages of Anthropic's API, and those for chat templates that are made of them. Pure.

A message of the user may hold results of tools, which are messages of their own for a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from eagleray.client.text.conversation import text_entry, wrong_entry

ATTRIBUTION = "x-anthropic-billing-header"
"""Beginning of a system text that some clients add. It is left out, as in vLLM: it has a new number in each request, so
that no prompt would begin as a cached one does."""

BLOCK_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}

_STRING = {"type": "string"}
_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _STRING},
    "required": ["type", "text"],
}
_TEXT_BLOCKS = {"type": "array", "items": _TEXT_BLOCK}
_RESULT_BLOCK = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": _STRING,
        "content": {"anyOf": [_STRING, _TEXT_BLOCKS, {"type": "null"}]},
    },
    "required": ["type", "tool_use_id"],
}
_USE_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "tool_use"}, "id": _STRING, "name": _STRING, "input": {"type": "object"}},
    "required": ["type", "id", "name", "input"],
}
_THINKING_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "thinking"}, "thinking": _STRING},
    "required": ["type", "thinking"],
}
_REDACTED_BLOCK = {
    "type": "object",
    "description": "Left out.",
    "properties": {"type": {"const": "redacted_thinking"}},
    "required": ["type"],
}


def _message_schema(role: str, *blocks: Any) -> dict[str, Any]:
    content = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [*blocks]}}]}
    return {"properties": {"role": {"const": role}, "content": content}, "required": ["role", "content"]}


MESSAGE_SCHEMA = {
    "anyOf": [
        _message_schema("user", _TEXT_BLOCK, _RESULT_BLOCK),
        _message_schema("assistant", _TEXT_BLOCK, _USE_BLOCK, _THINKING_BLOCK, _REDACTED_BLOCK),
        _message_schema("system", _TEXT_BLOCK),
    ]
}

AnthropicMessages = Annotated[
    list[Annotated[dict[str, Any], Meta(description="A message.", extra_json_schema=MESSAGE_SCHEMA)]],
    Meta(min_length=1),
]
SystemText = Annotated[
    str | list[Annotated[dict[str, Any], Meta(extra_json_schema=_TEXT_BLOCK)]] | None,
    Meta(description="System message, as a text or text blocks."),
]


def template_messages(
    system: str | Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages for chat templates. Raises `InvalidRequest` that names the block."""
    converted: list[dict[str, Any]] = []
    if text := _system_text(system or "", "system"):
        converted.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        path, role = f"messages[{index}]", message.get("role")
        if role == "user":
            converted += _user_messages(message.get("content"), f"{path}.content")
        elif role == "assistant":
            converted.append(_assistant_message(message.get("content"), f"{path}.content"))
        elif role == "system":
            if text := _system_text(message.get("content"), f"{path}.content"):
                converted.append({"role": "system", "content": text})
        else:
            raise wrong_entry(f"{path}.role", "must be user, assistant or system")
    return converted


def continues_last_message(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer: one of the assistant without calls of tools."""
    last = messages[-1]
    content = last.get("content")
    blocks = content if isinstance(content, list) else []
    return last.get("role") == "assistant" and not any(block.get("type") == "tool_use" for block in blocks)


def _system_text(content: Any, path: str) -> str:
    blocks = _blocks(content, path, "system")
    texts = [text_entry(block, "text", where) for where, block in blocks]
    return "\n".join(text for text in texts if not text.startswith(ATTRIBUTION))


def _user_messages(content: Any, path: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for where, block in _blocks(content, path, "user"):
        if block["type"] == "text":
            texts.append(text_entry(block, "text", where))
            continue
        if texts:
            messages.append({"role": "user", "content": "".join(texts)})
            texts = []
        name = text_entry(block, "tool_use_id", where)
        result = _result_text(block.get("content"), f"{where}.content")
        messages.append({"role": "tool", "tool_call_id": name, "content": result})
    if texts or not messages:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages


def _assistant_message(content: Any, path: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in _blocks(content, path, "assistant"):
        if block["type"] == "text":
            texts.append(text_entry(block, "text", where))
        elif block["type"] == "thinking":
            thoughts.append(text_entry(block, "thinking", where))
        elif block["type"] == "tool_use":
            calls.append(_call(block, where))
    # A text even beside calls, because some templates add texts to it.
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise wrong_entry(f"{path}.input", "must be an object")
    function = {"name": text_entry(block, "name", path), "arguments": dict(arguments)}
    return {"id": text_entry(block, "id", path), "type": "function", "function": function}


def _result_text(content: Any, path: str) -> str:
    if content is None:
        return ""
    return "\n".join(text_entry(block, "text", where) for where, block in _blocks(content, path, "system"))


def _blocks(content: Any, path: str, role: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the blocks of a content, each with its path. Raises `InvalidRequest` for types that a role cannot have."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise wrong_entry(path, 'must be a text, or a list of blocks such as {"type": "text", "text": "..."}')
    blocks = []
    for index, block in enumerate(content):
        where = f"{path}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind not in BLOCK_TYPES[role]:
            raise wrong_entry(f"{where}.type", f"is {kind!r:.60}, but here may be only {', '.join(BLOCK_TYPES[role])}")
        blocks.append((where, block))
    return blocks
