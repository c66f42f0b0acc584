"""Answers of the load of `make chaos`, put together from their events, and the differences between two of them."""

from __future__ import annotations

from typing import Any

import chaos_load
import pytest
from chaos_load import (
    ChaosAnswer,
    ChaosRequest,
    Choice,
    find_broken_constraints,
    find_choice_differences,
    make_requests,
)


def call(index: int, **function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "id": "random", "function": function}]}


def test_add_deltas_of_reasoning_and_calls_are_joined():
    deltas = [{"reasoning": "a"}, {"reasoning": "b"}, {"content": "c"}, call(0, name="find", arguments="")]
    deltas += [call(0, arguments="{"), call(0, arguments="}"), call(1, name="find", arguments="[]")]
    answer = ChaosAnswer()
    for delta in deltas:
        chaos_load._add(answer, {"choices": [{"index": 0, "delta": delta}]})
    assert answer.choices == {0: Choice(text="c", reasoning="ab", calls=["find{}", "find[]"])}


def test_add_whole_message_has_its_calls():
    calls = [{"id": "random", "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    answer = ChaosAnswer()
    chaos_load._add(answer, {"choices": [{"index": 0, "message": {"content": None, "tool_calls": calls}}]})
    assert answer.choices == {0: Choice(calls=["a{}", "b{}"])}


@pytest.mark.parametrize(("field", "one", "other"), [("reasoning", "a", "ab"), ("calls", ["find{}"], ["find[]"])])
def test_find_choice_differences_another_part_is_named(field, one, other):
    (difference,) = find_choice_differences(Choice(**{field: one}), Choice(**{field: other}))
    assert difference.startswith(f"{field}: ")


RECORD = '{"name": "river", "count": 7}'
WORDS = "stone " * 60 + "walks."


@pytest.mark.parametrize(
    ("kind", "good", "broken"),
    [
        ("schema", {"text": f"[{', '.join([RECORD] * 4)}]"}, {"text": f"[{RECORD}]"}),
        ("schema", {"text": f"[{', '.join([RECORD] * 5)}]"}, {"text": f"[{', '.join([RECORD] * 4)}"}),
        ("regex", {"text": f"\n^ Hm.~{WORDS}"}, {"text": f"^ Hm.~~{WORDS}"}),
        ("regex", {"text": WORDS}, {"text": WORDS[1:] + "."}),
        ("tools", {"calls": [f"find{RECORD}"]}, {"calls": [f"lose{RECORD}"]}),
        ("tools", {"calls": [f"count_all{RECORD}"]}, {"calls": ['find{"name": "river", "count": 1000}']}),
    ],
)
def test_find_broken_constraints_finished_answers_alone(kind, good, broken):
    request = next(request for request in make_requests(20, seed=0) if request.kind == kind)

    def find(**fields: Any) -> list[str]:
        return find_broken_constraints(request, ChaosAnswer({0: Choice(**fields)}))

    assert find(**good, finish_reason="stop") == []
    assert find(**broken, finish_reason="length") == []
    assert len(find(**broken, finish_reason="stop")) == 1


def test_find_broken_constraints_required_call_is_missing():
    request = ChaosRequest("tools", "", {"tool_choice": "required"})
    assert find_broken_constraints(request, ChaosAnswer({0: Choice(text="no", finish_reason="stop")}))
    request.body["tool_choice"] = "auto"
    assert not find_broken_constraints(request, ChaosAnswer({0: Choice(text="no", finish_reason="stop")}))
