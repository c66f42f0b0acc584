"""Brings the tool calls of a conversation, and their results, into the order and under the ids that a template needs.

Pure. The messages are the copies that `template_message` has made, so they are changed in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

from eagleray.client.text.template_form import MessageForm


def arrange_calls(conversation: list[dict[str, Any]], form: MessageForm) -> list[dict[str, Any]]:
    """Return the conversation with calls and results in the form of the template."""
    if not any(_calls(message) for message in conversation):
        return conversation
    _name_results(conversation)
    if form.has_function_ids:
        _number_calls(conversation)
    return [
        arranged
        for message, results in _exchanges(conversation)
        for arranged in _order_results(message, results, separates_calls=form.has_single_calls)
    ]


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


def _exchanges(conversation: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield the messages, and with a message that has calls the results that follow it."""
    index = 0
    while index < len(conversation):
        message = conversation[index]
        index = end = index + 1
        while _calls(message) and end < len(conversation) and conversation[end]["role"] == "tool":
            end += 1
        yield message, list(conversation[index:end])
        index = end


def _order_results(
    message: dict[str, Any], results: Sequence[dict[str, Any]], *, separates_calls: bool
) -> list[dict[str, Any]]:
    """Return a message and its results in the order of the calls, because many templates show no ids.

    With `separates_calls`, every call has a message of its own, which its results follow. Results of no call come last.
    """
    calls = _calls(message)
    places = {call_id: place for place, call in enumerate(calls) if (call_id := _id(call))}
    results_of: dict[int, list[dict[str, Any]]] = {place: [] for place in range(len(calls) + 1)}
    for result in results:
        results_of[places.get(_result_id(result), len(calls))].append(result)
    if not separates_calls or len(calls) < 2:
        return [message, *chain.from_iterable(results_of.values())]
    separated: list[dict[str, Any]] = []
    for place, call in enumerate(calls):
        separated += [{**(message if place == 0 else {"role": "assistant"}), "tool_calls": [call]}, *results_of[place]]
    return separated + results_of[len(calls)]


def _calls(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    calls: Sequence[dict[str, Any]] = message.get("tool_calls", ())
    return calls if message["role"] == "assistant" else ()


def _id(call: Mapping[str, Any]) -> str:
    return str(call.get("id", ""))


def _result_id(result: Mapping[str, Any]) -> str:
    return str(result.get("tool_call_id", ""))


def _has_function_id(call: Mapping[str, Any]) -> bool:
    start, _, number = _id(call).rpartition(":")
    return start == f"functions.{call['function']['name']}" and number.isdecimal()
