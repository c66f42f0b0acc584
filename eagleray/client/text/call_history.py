"""Brings the tool calls of a conversation, and their results, into the order and under the ids that a template needs.

Pure. The messages are the copies that `template_message` has made, so they are changed in place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count, islice, takewhile
from typing import Any

from eagleray.client.text.template_form import MessageForm


def arrange_calls(conversation: list[dict[str, Any]], form: MessageForm) -> list[dict[str, Any]]:
    """Return the conversation with calls and results in the form of the template."""
    if not any("tool_calls" in message for message in conversation):
        return conversation
    _name_results(conversation)
    if form.has_function_ids:
        _number_calls(conversation)
    return _separate_calls(conversation) if form.has_single_calls else conversation


def _name_results(conversation: Sequence[dict[str, Any]]) -> None:
    """Give the results their functions' names.

    In the conversations that templates are written for, results have names; in OpenAI's API they have ids only.
    """
    names: dict[str, str] = {}
    for message in conversation:
        names |= {_id(call): call["function"]["name"] for call in _calls(message) if _id(call)}
        name = names.get(_result_id(message)) if message["role"] == "tool" else None
        if name is not None:
            message.setdefault("name", name)


def _number_calls(conversation: Sequence[dict[str, Any]]) -> None:
    """Replace the ids by `functions.NAME:NUMBER`, numbered over the conversation, unless all have this form."""
    if all(_has_function_id(call) for message in conversation for call in _calls(message)):
        return
    numbers = count()
    new_ids: dict[str, str] = {}
    for message in conversation:
        for call in _calls(message):
            new_ids[_id(call)] = call["id"] = f"functions.{call['function']['name']}:{next(numbers)}"
        if message["role"] == "tool" and (result_id := _result_id(message)) in new_ids:
            message["tool_call_id"] = new_ids[result_id]


def _separate_calls(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every call a message of its own, which its results follow."""
    separated: list[dict[str, Any]] = []
    index = 0
    while index < len(conversation):
        message = conversation[index]
        index += 1
        if len(_calls(message)) < 2:
            separated.append(message)
            continue
        results = list(takewhile(lambda later: later["role"] == "tool", islice(conversation, index, None)))
        separated += _one_by_one(message, results)
        index += len(results)
    return separated


def _one_by_one(message: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a message for each call, followed by the results with its id. Results of no call come last."""
    one_by_one: list[dict[str, Any]] = []
    rest = list(results)
    for number, call in enumerate(_calls(message)):
        one_by_one.append({**(message if number == 0 else {"role": "assistant"}), "tool_calls": [call]})
        one_by_one += [result for result in rest if _answers(result, call)]
        rest = [result for result in rest if not _answers(result, call)]
    return one_by_one + rest


def _answers(result: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    return _result_id(result) == _id(call) != ""


def _calls(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    calls: Sequence[dict[str, Any]] = message.get("tool_calls", ())
    return calls


def _id(call: Mapping[str, Any]) -> str:
    return str(call.get("id", ""))


def _result_id(result: Mapping[str, Any]) -> str:
    return str(result.get("tool_call_id", ""))


def _has_function_id(call: Mapping[str, Any]) -> bool:
    return bool(re.fullmatch(rf"functions\.{re.escape(call['function']['name'])}:\d+", _id(call)))
