"""Facts of the embedded model: true where that can be computed, asked without doubt, and divided without overlap."""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import keyword
import random
import re
from functools import cache
from pathlib import Path

import pytest
from demo_model.accuracy import held_out_probes
from demo_model.dialogues import REFUSAL, DialogueSampler, sum_exchange, unknown_topics
from demo_model.facts import Fact, evaluate, load_facts, parse_fact
from demo_model.phrasings import (
    TEMPLATES,
    QuestionSplit,
    normal_form,
    phrasings_of,
    reworded,
    split_questions,
    with_typing_error,
)
from named_things import TARGET, make_targets

from eagleray.cli.commands import COMMANDS
from eagleray.cli.serve import add_arguments

ROOT = Path(__file__).parents[3]
FACTS = load_facts()
LONGEST_ANSWER = 250


@cache
def split() -> QuestionSplit:
    """Return the questions, divided once, and not whenever this module is imported."""
    return split_questions(FACTS)


def of_kind(*kinds: str) -> list[Fact]:
    return [fact for fact in FACTS if fact.kind in kinds]


def exists(name: str) -> bool:
    """Whether a dotted name leads from a module or a builtin to a value."""
    parts = name.split(".")
    if hasattr(builtins, parts[0]):
        owner, rest = builtins, parts
    else:
        count = next(n for n in range(len(parts), 0, -1) if is_module(".".join(parts[:n])))
        owner, rest = importlib.import_module(".".join(parts[:count])), parts[count:]
    for part in rest:
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_facts_are_some_hundreds_about_both_subjects():
    topics = [fact.topic for fact in FACTS]
    assert topics.count("python") >= 400 and topics.count("eagleray") >= 100 and topics.count("talk") >= 10


def test_facts_have_short_answers_that_contain_their_keys():
    assert {fact.kind for fact in FACTS} == set(TEMPLATES)
    for fact in FACTS:
        assert 5 <= len(fact.answer) <= LONGEST_ANSWER and fact.answer.endswith((".", "!", "?")), fact
        assert "~" not in fact.answer, fact
        assert fact.keys and all(key in fact.answer for key in fact.keys), fact


def test_facts_have_training_questions():
    assert [fact for fact in FACTS if not any(split().training[fact].values())] == []


def test_questions_that_are_equal_but_for_their_form_have_one_answer():
    answers: dict[str, set[str]] = {}
    for fact in FACTS:
        for phrasing in phrasings_of(fact):
            answers.setdefault(normal_form(phrasing.text), set()).add(fact.answer)
    assert [question for question, found in answers.items() if len(found) > 1] == []


def test_questions_in_training_are_none_of_the_held_out_ones():
    sampler, rng = DialogueSampler(split(), [], []), random.Random(0)
    assert len(split().held_out) > 1000
    for fact in FACTS:
        for question in (sampler.ask(fact, rng, is_first=True) for _ in range(10)):
            assert not split().is_held_out(fact, question), question


def test_reworded_keeps_all_but_synonyms_and_unstressed_words():
    rng = random.Random(0)
    changed = {reworded("How do I convert a list to a string?", rng) for _ in range(200)}
    assert {"How do I convert a list to a string?", "How do I turn a list to a text?", "convert list string"} <= changed
    assert not any("make" in question or "bytes" in question for question in changed)


def test_held_out_phrasings_are_of_three_kinds():
    probes = held_out_probes(split(), limit=100)
    assert {kind: len(pairs) for kind, pairs in probes.items()} == dict.fromkeys(
        ("subject", "goal", "paraphrase", "unknown topic"), 100
    )


def test_names_in_facts_exist_in_python():
    names = [fact.subject for fact in of_kind("name", "module")]
    assert len(names) > 300 and [name for name in names if not exists(name)] == []


def test_keywords_and_errors_in_facts_are_those_of_python():
    assert {fact.subject for fact in of_kind("keyword")} <= {*keyword.kwlist, *keyword.softkwlist}
    errors = [getattr(builtins, fact.subject) for fact in of_kind("error")]
    assert len(errors) > 20 and all(issubclass(error, BaseException) for error in errors)


def test_example_is_shown_with_the_value_that_python_computes():
    fact = parse_fact("python", ["name math.sqrt: returns the ~square root~.", "> math.sqrt(16)"])
    assert fact.answer == "`math.sqrt` returns the square root. For example, `math.sqrt(16)` is `4.0`."
    assert evaluate('json.dumps({"a": [1, None]})') == repr('{"a": [1, null]}')


@pytest.mark.parametrize("lines", [["json.dumps turns"], ["name len: returns ~n~.", "= len([])"]])
def test_parse_fact_of_an_unknown_form_raises(lines):
    with pytest.raises(ValueError, match="expected"):
        parse_fact("python", lines)


def test_options_in_facts_are_options_of_serve():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    texts = [text for fact in FACTS if fact.topic == "eagleray" for text in (fact.subject, fact.answer)]
    named = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    assert len(named) > 60 and sorted(named - options - {"--help"}) == []


def test_routes_in_facts_are_routes_of_the_server():
    sources = "".join(path.read_text() for path in (ROOT / "eagleray" / "server").rglob("*.py"))
    routes = [fact.subject for fact in of_kind("route")]
    assert len(routes) > 30 and [route for route in routes if f'"{route}"' not in sources] == []


def test_commands_functions_and_files_in_facts_exist():
    text = "\n".join(fact.answer for fact in FACTS if fact.topic == "eagleray")
    commands = set(re.findall(r"Run `?eagleray ([a-z-]+)", text))
    assert len(commands) >= 8 and commands <= set(COMMANDS)
    targets = set(TARGET.findall(text))
    assert targets and targets <= make_targets(ROOT)
    paths = set(re.findall(r"\bdeploy/[A-Za-z/]+(?:\.yaml)?", text))
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []
    functions = {"serve": "build_app", "data": "generate"}
    for package, name in functions.items():
        assert f"def {name}(" in "".join(p.read_text() for p in (ROOT / "eagleray" / package).glob("*.py"))


def test_the_question_of_the_readme_is_a_training_question():
    asked = re.findall(r'"role": "user", "content": "([^"]+)"', (ROOT / "README.md").read_text())
    trained = {text for by_kind in split().training.values() for texts in by_kind.values() for text in texts}
    assert asked and set(asked) <= trained


def test_normal_form_drops_what_people_add():
    assert normal_form("Hi, what does `json.dumps` do in Python?") == normal_form("What does json.dumps do")


def test_with_typing_error_changes_one_word_and_keeps_short_ones():
    rng = random.Random(0)
    assert with_typing_error("What is a set?", rng) == "What is a set?"
    changed = [with_typing_error("How do I reverse a list?", rng) for _ in range(20)]
    assert all(text.startswith("How do I ") and text.endswith(" a list?") for text in changed) and len(set(changed)) > 5


def test_sampler_draws_the_same_conversations_again_with_roles_in_turn():
    sampler = DialogueSampler(split(), ["shelve.open", "json.dumps", "wave.open"], ["import this"])
    for seed in range(200):
        turns = sampler.sample(random.Random(seed))
        assert turns == sampler.sample(random.Random(seed))
        roles = [role for role, _ in turns if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles


def test_sampler_refuses_unknown_names_but_no_fact():
    sampler = DialogueSampler(split(), ["shelve.open", "json.dumps", "wave.open"], ["import this"])
    assert set(sampler.unknown_names) <= {"shelve.open", "wave.open"}
    refused = {text for seed in range(300) for text in refused_questions(sampler.sample(random.Random(seed)))}
    assert refused and not any("json.dumps" in text for text in refused)


def refused_questions(turns: list[tuple[str, str]]) -> list[str]:
    return [turns[i - 1][1] for i, (_, text) in enumerate(turns) if text == REFUSAL]


def test_unknown_topics_are_no_questions_about_facts():
    asked = {normal_form(phrasing.text) for fact in FACTS for phrasing in phrasings_of(fact)}
    unknown = {normal_form(text) for group in unknown_topics() for text in group}
    assert len(unknown) > 1000 and unknown & asked == set()


def test_sum_exchange_answers_with_the_value():
    for seed in range(100):
        _, answer = sum_exchange(random.Random(seed))
        expression, _, value = answer.rstrip(".").partition(" is ")
        assert eval(expression) == int(value)
