"""Grammars that would take much time or memory: refused by counts, before the library has done much work."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_tokenizers import WHITESPACE, Words

from eagleray.errors import InvalidRequest
from eagleray.grammars.llguidance_errors import GrammarTooLarge
from eagleray.messages.grammars import Grammar, GrammarKind
from eagleray.worker.grammars import WorkerGrammars

WORDS = Words.make()


def schema(value: Any) -> Grammar:
    source = value if isinstance(value, str) else json.dumps(value)
    return Grammar(kind="json_schema", source=source, whitespace=WHITESPACE)


def tag(form: dict[str, Any]) -> Grammar:
    return Grammar(kind="structural_tag", source=json.dumps({"format": form}), whitespace=WHITESPACE)


def chain(length: int, link: str) -> dict[str, Any]:
    """Return a schema whose definitions each refer to the next one."""
    links = {str(number): json.loads(link.replace("NEXT", f"#/$defs/{number + 1}")) for number in range(length)}
    return {"$defs": links | {str(length): {"type": "null"}}, "$ref": "#/$defs/0"}


def rules(length: int, rule: str) -> str:
    """Return a grammar whose rules each name the next one."""
    named = [rule.replace("NEXT", f"r{number + 1}").replace("RULE", f"r{number}") for number in range(length)]
    return "\n".join(["start: r0", *named, f'r{length}: "x"'])


TOO_LARGE: dict[str, Grammar] = {
    "an expression of 10 MB": Grammar(kind="regex", source="a" * 10_000_000),
    "100,000 choices": Grammar(kind="choice", source=json.dumps([f"choice number {n}" for n in range(100_000)])),
    "an enumeration of 100,000 values": schema({"enum": [f"value {n}" for n in range(100_000)]}),
    "a schema of 10 MB": schema({"description": "x" * 10_000_000}),
    "20,000 properties": schema({"properties": {f"p{n}": {"type": "string"} for n in range(20_000)}}),
    "a schema nested 100,000 times": schema('{"items":' * 100_000 + "{}" + "}" * 100_000),
    "a schema nested 200 times": schema('{"items":' * 200 + "{}" + "}" * 200),
    "a product of alternatives": schema(
        {"allOf": [
            {"anyOf": [{"required": [f"p{m}{n}"], "properties": {f"p{m}{n}": {"minLength": n}}} for n in range(6)]}
            for m in range(8)
        ]}
    ),
    "many patterns of names": schema({"patternProperties": {f"^a{n}.*b{n}$": {} for n in range(300)}}),
    "a grammar of 5 MB": Grammar(kind="ebnf", source=f'start: "{"x" * 5_000_000}"'),
    "20,000 rules": Grammar(kind="ebnf", source=rules(5_000, 'RULE: "a" NEXT')),
    "20,000 rules within a structural tag": tag({"type": "grammar", "grammar": rules(5_000, 'RULE: "a" NEXT')}),
    "a terminal that doubles": Grammar(
        kind="ebnf", source="start: T\n" + "\n".join(f"T{n or ''}: T{n + 1} T{n + 1}" for n in range(40)) + '\nT40: "a"'
    ),
    "20,000 parentheses": Grammar(kind="ebnf", source="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a count": Grammar(kind="regex", source="a{1000000}"),
    "nested counts": Grammar(kind="regex", source="(a{1000}){1000}"),
    "alternatives before alternatives": tag(
        {"type": "tag", "begin": "<", "end": [f"</a{n}>" for n in range(5_000)],
         "content": {"type": "or", "elements": [{"type": "const_string", "value": str(n)} for n in range(5_000)]}}
    ),
    "alternatives of free text before alternatives": tag(
        {"type": "tag", "begin": "<", "end": [f"</a{n}>" for n in range(1_500)],
         "content": {"type": "or", "elements": [{"type": "any_text", "excludes": [str(n)]} for n in range(1_500)]}}
    ),
    "100,000 formats": tag({"type": "sequence", "elements": [{"type": "const_string", "value": "ab"}] * 100_000}),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_hostile_grammar_is_refused_as_too_large(name: str) -> None:
    with pytest.raises(GrammarTooLarge):
        WORDS.compile(TOO_LARGE[name])


ENDLESS: dict[str, Grammar] = {
    "a rule without an end": Grammar(kind="ebnf", source='root ::= "a" root'),
    "a rule that doubles": Grammar(
        kind="ebnf", source="start: t0\n" + "\n".join(f"t{n}: t{n + 1} t{n + 1}" for n in range(40)) + '\nt40: "a"'
    ),
    "nested repetitions": tag(
        {"type": "repeat", "min": 10**6, "max": -1,
         "content": {"type": "repeat", "min": 10**6, "max": -1, "content": {"type": "const_string", "value": "a"}}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_grammar_beyond_the_limits_is_refused_or_its_matcher_fails_by_a_sentence(name: str) -> None:
    try:
        matcher = WORDS.compile(ENDLESS[name]).matcher()
    except InvalidRequest:
        return
    token_ids = WORDS.encode("a")
    for _ in range(3):
        WORDS.allows(matcher, WORDS.eos)
        matcher.accept(token_ids)
    WORDS.allows(matcher, WORDS.eos)
    assert matcher.failure is not None and matcher.failure.startswith("the grammar of the completion failed: ")


AMBIGUOUS = {
    "grammar": ("ebnf", 'root ::= root root | "a" | ""', "a"),
    "optional parts": ("ebnf", 'start: a\na: a a a a a a a a | "x"? "x"?', "x"),
    "expression": ("regex", "(a|a)*(aa|a)*(a?){100}", "a"),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_grammar_is_followed_for_long(name: str) -> None:
    kind, source, text = AMBIGUOUS[name]
    kinds: dict[str, GrammarKind] = {"ebnf": "ebnf", "regex": "regex"}
    compiled = WORDS.compile(Grammar(kind=kinds[kind], source=source))
    assert WORDS.matched(compiled, WORDS.encode(text) * 50)


@pytest.mark.parametrize(
    "grammar",
    [
        schema(chain(2000, '{"items":{"$ref":"NEXT"}}')),
        schema(chain(2000, '{"anyOf":[{"$ref":"NEXT"},{"type":"string"}]}')),
        Grammar(kind="ebnf", source=rules(1900, 'RULE: "a" NEXT')),
        Grammar(kind="ebnf", source=rules(1900, "RULE: NEXT")),
    ],
    ids=["items", "alternatives", "rules", "renamed rules"],
)
def test_long_chain_of_references_does_not_overflow_the_stack_of_a_worker(grammar: Grammar) -> None:
    grammars = WorkerGrammars(lambda: WORDS.compiler)
    try:
        grammars.get(grammar)
    except RuntimeError as error:
        assert "too large" in str(error)
    finally:
        grammars.close()


def test_schema_with_a_property_grammar_in_a_structural_tag_may_have_many_optional_properties() -> None:
    names = ["grammar", *(f"p{number}" for number in range(200))]
    large = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    matcher = WORDS.compile(tag({"type": "json_schema", "json_schema": large})).matcher()
    matcher.accept(WORDS.encode('{"grammar": null, "p1": null, "'))
    assert matcher.failure is None


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="ebnf", source='start: a\na: a a | "x"\n'),
        tag({"type": "grammar", "grammar": 'start: a\na: "x" a | "x"\n'}),
    ],
)
def test_grammar_whose_work_grows_with_the_text_fails_before_a_token_takes_long(grammar: Grammar) -> None:
    matcher = WORDS.compile(grammar).matcher()
    [x] = WORDS.encode("x")
    matcher.accept([x] * 200)
    assert matcher.failure is None
    matcher.accept([x] * 300)
    assert matcher.failure is not None and "max is 500" in matcher.failure
