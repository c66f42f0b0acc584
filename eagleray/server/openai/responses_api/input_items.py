"""The items of a request's `input`, and the messages for chat templates that are made of them. Pure.

Items are messages, function calls with their outputs, and reasoning. One turn of an assistant is several items, but one
message for a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from eagleray.client.text.conversation import text_entry, wrong_entry

ROLES = ("user", "assistant", "system", "developer")
TEXT_TYPES = ("input_text", "output_text", "text")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
OPEN_STATUSES = ("in_progress", "incomplete")

_STRING = {"type": "string"}
_TEXT_PARTS = {
    "type": "array",
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"enum": [*TEXT_TYPES]}, "text": _STRING},
                "required": ["type", "text"],
            },
            {
                "type": "object",
                "properties": {"type": {"const": "refusal"}, "refusal": _STRING},
                "required": ["type", "refusal"],
            },
        ]
    },
}
_TEXT = {"anyOf": [_STRING, _TEXT_PARTS]}
_REASONING_PARTS = {
    "anyOf": [
        {"type": "array", "items": {"type": "object", "properties": {"text": _STRING}, "required": ["text"]}},
        {"type": "null"},
    ]
}
ITEM_SCHEMA = {
    "anyOf": [
        {
            "title": "message",
            "properties": {
                "type": {"enum": ["message", None]},
                "role": {"enum": [*ROLES]},
                "content": _TEXT,
                "status": {"description": "An assistant's message in_progress or incomplete at the end is continued."},
            },
            "required": ["role", "content"],
        },
        {
            "title": "function_call",
            "properties": {
                "type": {"const": "function_call"},
                "call_id": _STRING,
                "name": _STRING,
                "arguments": {"type": "string", "description": "A JSON object."},
            },
            "required": ["type", "call_id", "name", "arguments"],
        },
        {
            "title": "function_call_output",
            "properties": {"type": {"const": "function_call_output"}, "call_id": _STRING, "output": _TEXT},
            "required": ["type", "call_id", "output"],
        },
        {
            "title": "reasoning",
            "properties": {
                "type": {"const": "reasoning"},
                "summary": _REASONING_PARTS,
                "content": {**_REASONING_PARTS, "description": "Preferred to `summary`."},
            },
            "required": ["type"],
        },
    ]
}

InputItems = Annotated[
    list[Annotated[dict[str, Any], Meta(description="Part of a conversation.", extra_json_schema=ITEM_SCHEMA)]],
    Meta(min_length=1),
]
"""Type of an `input` that is a list."""


def to_messages(instructions: str | None, items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for `instructions` and `input`. Raises `InvalidRequest` that names the item."""
    transcript = _Transcript()
    if instructions:
        transcript.add_message("system", instructions)
    if isinstance(items, str):
        transcript.add_message("user", items)
        return transcript.messages
    for index, item in enumerate(items):
        transcript.add(item, f"input[{index}]")
    for message in transcript.messages:
        if message["content"] is None:
            message["content"] = ""  # some templates add texts to the content even beside calls
    return transcript.messages


def continues_last_item(items: str | Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last item is an unfinished message of the assistant, which the answer goes on with."""
    last = {} if isinstance(items, str) else items[-1]
    is_message = last.get("type") in (None, "message") and last.get("role") == "assistant"
    return is_message and last.get("status") in OPEN_STATUSES


class _Transcript:
    """Messages made so far."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type", "message") or "message"
        if kind == "message":
            role = item.get("role")
            if role not in ROLES:
                raise wrong_entry(f"{path}.role", f"must be one of {', '.join(ROLES)}")
            self.add_message(role, _text(item.get("content"), f"{path}.content"))
        elif kind == "function_call":
            self._add_call(item, path)
        elif kind == "function_call_output":
            content = _text(item.get("output"), f"{path}.output")
            self.messages.append(
                {"role": "tool", "tool_call_id": text_entry(item, "call_id", path), "content": content}
            )
        elif kind == "reasoning":
            self._add_reasoning(item, path)
        else:
            raise wrong_entry(
                f"{path}.type",
                f"is {kind!r:.60}, which this server does not support; there are {', '.join(ITEM_TYPES)}",
            )

    def add_message(self, role: str, text: str) -> None:
        last = self._assistant()
        if role == "assistant" and last is not None and last["content"] is None and "tool_calls" not in last:
            last["content"] = text
        else:
            self.messages.append({"role": role, "content": text})

    def _add_call(self, item: Mapping[str, Any], path: str) -> None:
        function = {"name": text_entry(item, "name", path), "arguments": text_entry(item, "arguments", path)}
        call = {"id": text_entry(item, "call_id", path), "type": "function", "function": function}
        self._open_assistant().setdefault("tool_calls", []).append(call)

    def _add_reasoning(self, item: Mapping[str, Any], path: str) -> None:
        name = "content" if item.get("content") else "summary"
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(_has_text(part) for part in parts):
            raise wrong_entry(
                f"{path}.{name}", 'must be a list of parts such as {"type": "reasoning_text", "text": "..."}'
            )
        text = "\n".join(part["text"] for part in parts)
        if not text:
            return  # encrypted reasoning of another server, or none
        last = self._assistant()
        if last is None or last["content"] is not None or "tool_calls" in last:
            self.messages.append(last := {"role": "assistant", "content": None})
        last["reasoning"] = f"{last['reasoning']}\n{text}" if "reasoning" in last else text

    def _assistant(self) -> dict[str, Any] | None:
        """Return the last message if it is the assistant's."""
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else None

    def _open_assistant(self) -> dict[str, Any]:
        if (last := self._assistant()) is not None:
            return last
        self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_entry(path, 'must be a text, or a list of parts such as {"type": "input_text", "text": "..."}')
    return "".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in (*TEXT_TYPES, "refusal"):
        raise wrong_entry(
            f"{path}.type", f"is {kind!r:.60}, but only texts are supported: {', '.join(TEXT_TYPES)} and refusal"
        )
    name = "refusal" if kind == "refusal" else "text"
    return text_entry(part, name, path)


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)
