from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grammar_tokenizers import WHITESPACE, Words

from eagleray.errors import InvalidRequest
from eagleray.messages.grammars import Grammar

MARKERS = ["<tool_call>", "</tool_call>", "<|end|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
A: dict[str, Any] = {"type": "json_schema", "json_schema": OBJECT}
ANY: dict[str, Any] = {"type": "any_text"}


@pytest.fixture(scope="module", params=["text", "special tokens", "added tokens"])
def words(request: pytest.FixtureRequest) -> Words:
    """The markers are ordinary text, special tokens, or tokens that the tokenizer does not declare as special."""
    match request.param:
        case "special tokens":
            return Words.make(special=MARKERS)
        case "added tokens":
            return Words.make(added=MARKERS)
        case _:
            return Words.make()


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def calls(**options: Any) -> dict[str, Any]:
    tags = [tag(f"<function={name}>", content, "</function>") for name, content in {"f": A, "g": const("x")}.items()]
    return {"type": "triggered_tags", "triggers": ["<function="], "tags": tags, **options}


F = '<function=f>{"a": 1}</function>'
G = "<function=g>x</function>"


def hermes(**options: Any) -> dict[str, Any]:
    tags = [tag('<tool_call>\n{"name": "f", "arguments": ', A, "}\n</tool_call>")]
    return {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, **options}


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def xml(style: str, properties: dict[str, Any], required: list[str], **others: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, **others}
    return {"type": "json_schema", "style": style, "json_schema": schema}


def qwen(properties: dict[str, Any], required: list[str], **others: Any) -> dict[str, Any]:
    return tag("<function=f>", xml("qwen_xml", properties, required, **others), "\n</function>")


def glm(properties: dict[str, Any], required: list[str], **others: Any) -> dict[str, Any]:
    return tag("<tool_call>f", xml("glm_xml", properties, required, **others), "\n</tool_call>")


def qwen_call(*pairs: tuple[str, str]) -> str:
    inner = "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in pairs)
    return f"<function=f>\n{inner}\n</function>"


def glm_call(*pairs: tuple[str, str]) -> str:
    inner = "\n".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>" for name, value in pairs)
    return f"<tool_call>f\n{inner}\n</tool_call>"


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const('é/"\\n <|end|>'), ['é/"\\n <|end|>'], ["", "é", 'é/"\\n']),
    "json_schema": (A, ['{"a": 1}', '{"a":1}', '{\n  "a": 1\n}'], ["", "{}", '{"a": 1} ', '{"b": 1}', '{"a": "1"}']),
    "json_schema, few spaces": (A | {"max_whitespace_cnt": 1}, ['{"a": 1}', '{ "a" : 1 }'], ['{"a":  1}']),
    "json_schema, no spaces": (A | {"max_whitespace_cnt": 0}, ['{"a":1}'], ['{"a": 1}']),
    "json_schema, true": ({"type": "json_schema", "json_schema": True}, ["[1, {}]", "null"], ["nul"]),
    "any_text": (ANY, ["", "any\n\ttext é 😀", "a < b"], []),
    "any_text, excludes": (
        ANY | {"excludes": ["BAD", "<tool_call>"]},
        ["", "BA", "<tool_cal"],
        ["BAD", "a BAD b", "a<tool_call>b"],
    ),
    "regex": ({"type": "regex", "pattern": "[a-z]+/\\d{2}"}, ["ab/12"], ["ab12", "/12", "ab/123"]),
    "grammar, GBNF": (
        {"type": "grammar", "grammar": 'root ::= "<" item ">"\nitem ::= "a" | "b" item'},
        ["<a>", "<bba>"],
        ["<b>", "a"],
    ),
    "grammar, Lark": ({"type": "grammar", "grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]+/'}, ["x12"], ["x", "12"]),
    "sequence": (sequence(const("a"), A, const("b")), ['a{"a": 1}b'], ["a", 'a{"a": 1}', '{"a": 1}b']),
    "sequence, free text before a marker": (
        sequence(ANY, const("<|end|>"), const("x")),
        ["<|end|>x", "a b<|end|>x"],
        ["", "x", "a<|end|>", "a<|end|>b<|end|>x"],
    ),
    "sequence, free text before a tag": (
        sequence(ANY, tag("<a>", A, "</a>")),
        ['<a>{"a": 1}</a>', 'text <a>{"a": 1}</a>'],
        ["", "<a>", "<a>x</a>"],
    ),
    "or": (
        {"type": "or", "elements": [A, const("none"), {"type": "regex", "pattern": "\\{x+"}]},
        ['{"a": 1}', "none", "{xx"],
        ["", "{", 'none{"a": 1}'],
    ),
    "optional": (sequence({"type": "optional", "content": A}, const(".")), [".", '{"a":1}.'], ["", '{"a":1}{"a":1}.']),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "ababab"], ["", "aba"]),
    "star": ({"type": "star", "content": const("ab")}, ["", "ab", "ababab"], ["aba"]),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": const("ab")}, ["ab", "abab"], ["", "ababab"]),
    "repeat without a largest number": (
        {"type": "repeat", "min": 2, "max": -1, "content": const("ab")},
        ["abab", "ababab"],
        ["", "ab"],
    ),
    "tag": (tag("<a>", A, "</a>"), ['<a>{"a": 1}</a>'], ['{"a": 1}', '<a>{"a": 1}', '<a>{"a": 1} </a>']),
    "tag with several ends": (tag("<a>", const("x"), ["</a>", "</b>"]), ["<a>x</a>", "<a>x</b>"], ["<a>x"]),
    "tag without an end": (tag("<a>", A, ""), ['<a>{"a": 1}'], ["<a>"]),
    "tag with free text": (
        tag("<tool_call>", ANY, "</tool_call>"),
        ["<tool_call></tool_call>", "<tool_call>a < b\n</tool_call>"],
        ["<tool_call>", "<tool_call>x", "<tool_call></tool_call>x", "<tool_call>a</tool_call></tool_call>"],
    ),
    "tag with free text and several ends": (
        tag("<a>", ANY, ["</a>", "<|end|>"]),
        ["<a>x</a>", "<a>x<|end|>"],
        ["<a>x", "<a>x</a><|end|>"],
    ),
    "tag without an end, with free text": (tag("<a>", ANY, ""), ["<a>", "<a>text</a>"], ["text"]),
    "triggered_tags": (
        calls(),
        ["", "text", "a < b <function", F, f"text {F}", f"{F}{G} text {F} text"],
        ["<function=", "<function=h>x</function>", "<function=f>x</function>", f"{F}<function=g>{{}}</function>"],
    ),
    "triggered_tags, at_least_one": (calls(at_least_one=True), [F, f"{F} text {G} text"], ["", "text", f"text {F}"]),
    "triggered_tags, stop_after_first": (
        calls(stop_after_first=True),
        ["", "text", F, f"text {F}"],
        [f"{F} ", f"{F}{F}", f"text {F} text"],
    ),
    "triggered_tags, exactly one": (
        calls(at_least_one=True, stop_after_first=True),
        [F, G],
        ["", "text", f"text {F}", f"{F} ", F + F],
    ),
    "triggered_tags, excludes": (calls(excludes=["BAD"]), ["BA", f"text {F} BA"], ["BAD", f"BAD {F}", f"{F} BAD"]),
    "triggered_tags in a tag": (
        tag("<a>", calls(), "</a>"),
        ["<a></a>", f"<a>text {F} text</a>"],
        [f"<a>{F}", "<a><function=</a>", f"<a>{F}</a>x"],
    ),
    "triggered_tags, a marker as trigger": (
        hermes(),
        ["", "text", CALL, f"text {CALL}\n{CALL} text"],
        ["<tool_call>", "text<tool_call>{}", f"{CALL}<tool_call>x</tool_call>"],
    ),
    "triggered_tags, a part of a marker as trigger": (
        hermes(triggers=["<tool_"]),
        ["", "text <tool", f"text {CALL}"],
        ["text <tool_call>x", "text <tool_call>"],
    ),
    "triggered_tags, text before a marker as trigger": (
        {
            "type": "triggered_tags",
            "triggers": ["\n<tool_call>"],
            "tags": [tag("\n<tool_call>a", const("b"), "</tool_call>")],
        },
        ["", "\n", "text\n<tool_call>ab</tool_call>\n", "\n<tool_call>ab</tool_call>\n<tool_call>ab</tool_call>"],
        ["text\n<tool_call>", "text\n<tool_call>x"],
    ),
    "tags_with_separator": (
        {
            "type": "tags_with_separator",
            "tags": [tag("<a>", const("x"), "</a>"), tag("<b>", A, "</b>")],
            "separator": ", ",
        },
        ["", "<a>x</a>", '<a>x</a>, <b>{"a": 1}</b>, <a>x</a>'],
        ["text", "<a>x</a>,", "<a>x</a><a>x</a>", "<a>x</a>, "],
    ),
    "tags_with_separator, exactly one": (
        {
            "type": "tags_with_separator",
            "tags": [tag("<a>", const("x"), "</a>")],
            "separator": "",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<a>x</a>"],
        ["", "<a>x</a><a>x</a>"],
    ),
    "qwen_xml, strings": (
        qwen({"city": {"type": "string"}, "zip": {"type": "string"}}, ["city"]),
        [
            qwen_call(("city", "Paris")),
            qwen_call(("city", "a < b\n{}"), ("zip", "1")),
            "<function=f>\n<parameter=city>Paris</parameter>\n</function>",
        ],
        [qwen_call(("zip", "1")), qwen_call(("city", "a"), ("town", "b")), qwen_call(("zip", "1"), ("city", "a"))],
    ),
    "qwen_xml, other types": (
        qwen({"n": {"type": "integer"}, "o": OBJECT, "e": {"enum": ["x", 3]}, "b": {"const": True}}, []),
        [
            qwen_call(("n", "12"), ("o", '{"a": 1}'), ("e", "x"), ("b", "true")),
            qwen_call(("e", "3")),
            "<function=f>\n</function>",
        ],
        [qwen_call(("n", "x")), qwen_call(("o", "{}")), qwen_call(("e", "y")), qwen_call(("b", "false"))],
    ),
    "qwen_xml, limited strings": (
        qwen({"p": {"type": "string", "pattern": "^[a-z]+$"}, "s": {"type": "string", "maxLength": 3}}, []),
        [qwen_call(("p", "abc")), qwen_call(("s", "a/b")), qwen_call(("s", "")), qwen_call(("p", "x"), ("s", "y"))],
        [qwen_call(("p", "")), qwen_call(("p", "A")), qwen_call(("s", "abcd"))],
    ),
    "qwen_xml, unions": (
        qwen({"u": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "t": {"type": ["boolean", "string"]}}, []),
        [qwen_call(("u", "1")), qwen_call(("u", "null")), qwen_call(("t", "any text"))],
        [qwen_call(("u", "x")), qwen_call(("u", '"x"'))],
    ),
    "qwen_xml, references": (
        qwen(
            {"r": {"$ref": "#/$defs/R"}},
            ["r"],
            **{"$defs": {"R": {"type": "array", "items": {"$ref": "#/$defs/N"}}, "N": {"type": "integer"}}},
        ),
        [qwen_call(("r", "[1, 2]"))],
        [qwen_call(("r", "[x]"))],
    ),
    "qwen_xml, additional properties": (
        qwen({"a": {"type": "integer"}}, [], additionalProperties={"type": "boolean"}),
        [qwen_call(("a", "1"), ("b", "true"), ("c", "false")), qwen_call(("b", "true"))],
        [qwen_call(("b", "1")), qwen_call(("a", "true"))],
    ),
    "glm_xml": (
        glm({"city": {"type": "string"}, "days": {"type": "integer"}}, ["city"]),
        [glm_call(("city", "Paris < Lyon")), glm_call(("city", "P"), ("days", "2"))],
        [glm_call(("days", "2")), glm_call(("city", "P"), ("days", "x")), "<tool_call>f\n</tool_call>"],
    ),
}


def compile_tag(words: Words, form: dict[str, Any], **others: Any) -> Any:
    source = json.dumps({"type": "structural_tag", "format": form, **others})
    return words.compile(Grammar(kind="structural_tag", source=source, whitespace=WHITESPACE))


@pytest.mark.parametrize("name", CASES)
def test_structural_tag_of_each_format_matches_its_texts_alone(words: Words, name: str) -> None:
    form, right, wrong = CASES[name]
    compiled = compile_tag(words, form)
    for text in right:
        assert words.matched(compiled, words.encode(text)), text
        assert words.accepted(compiled, words.encode(text, by_byte=True)), text
    for text in wrong:
        assert not words.matched(compiled, words.encode(text)), text
        assert not words.accepted(compiled, words.encode(text, by_byte=True)), text


def test_structural_tag_in_the_older_form_is_triggered_tags(words: Words) -> None:
    structures = [{"begin": "<function=f>", "schema": schema, "end": "</function>"} for schema in (OBJECT,)]
    for item in (structures, [structures[0] | {"schema": json.dumps(OBJECT)}]):
        source = json.dumps({"type": "structural_tag", "structures": item, "triggers": ["<function="]})
        compiled = words.compile(Grammar(kind="structural_tag", source=source, whitespace=WHITESPACE))
        assert words.matched(compiled, words.encode(f"text {F} text"))
        assert not words.matched(compiled, words.encode("text <function=f>{}</function>"))


def test_marker_that_is_a_token_is_matched_as_that_token_only() -> None:
    for words in (Words.make(special=MARKERS), Words.make(added=MARKERS)):
        spelled = [token for character in CALL for token in words.encode(character)]
        for form in (hermes(), hermes(at_least_one=True), tag("<tool_call>", ANY, "</tool_call>")):
            compiled = compile_tag(words, form)
            assert words.accepted(compiled, words.encode(CALL))
            assert not words.accepted(compiled, spelled)


def test_free_text_has_tokens_that_are_not_declared_special() -> None:
    words = Words.make(special=["<|end|>"], added=["<think>", "<tool_call>"])
    compiled = compile_tag(words, hermes())
    assert words.matched(compiled, words.encode(f"<think>a<think>{CALL}<think>"))
    assert not words.matched(compiled, words.encode("a<|end|>"))


def test_token_format_is_matched_by_content_and_by_id() -> None:
    words = Words.make(special=MARKERS)
    for token in ("<|end|>", words.tokenizer.token_to_id("<|end|>")):
        end = {"type": "token", "token": token}
        for form in (sequence(ANY, end), tag(end, ANY, end)):
            compiled = compile_tag(words, form)
            assert words.matched(compiled, words.encode("<|end|>" if form["type"] == "sequence" else "<|end|>x<|end|>"))
            assert not words.matched(compiled, words.encode("x"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": ({"type": "token_dispatch"}, "types of formats are const_string, json_schema"),
    "an unknown field": (ANY | {"max_tokens": 5}, "unknown field `max_tokens`"),
    "an unknown style": (A | {"style": "cohere_xml"}, "cohere_xml"),
    "a schema that nothing follows": ({"type": "json_schema", "json_schema": False}, "matches nothing"),
    "a schema with unsupported keywords": (
        {"type": "json_schema", "json_schema": {"not": {"type": "string"}}},
        "keywords that are not supported: `not`",
    ),
    "no alternatives": ({"type": "or", "elements": []}, "no alternatives"),
    "free text without an end": (sequence(ANY, A), "has to be a const_string, a token, or a tag"),
    "free text that is repeated": ({"type": "star", "content": ANY}, "cannot be repeated"),
    "free text with an empty end": (tag("<a>", ANY, ["</a>", ""]), "each of its ends"),
    "a repetition of less than nothing": ({"type": "repeat", "min": 3, "max": 2, "content": A}, "min <= max"),
    "a tag without a trigger": (calls(triggers=["<tool"]), "exactly one of the triggers"),
    "a tag with two triggers": (calls(triggers=["<f", "<function"]), "exactly one of the triggers"),
    "an unknown token": ({"type": "token", "token": "<|none|>"}, "none of the special tokens"),
    "a wrong regular expression": ({"type": "regex", "pattern": "("}, "unclosed group in ("),
    "XML without an object": ({"type": "json_schema", "json_schema": {"type": "array"}, "style": "qwen_xml"}, "object"),
    "XML with unsupported keywords": (xml("qwen_xml", {}, [], minProperties=1), "minProperties"),
    "XML with an unknown reference": (xml("glm_xml", {"a": {"$ref": "#/$defs/a"}}, []), "does not exist"),
    "XML with wrong properties": (xml("qwen_xml", [], []), "properties"),  # type: ignore[arg-type]
    "XML with a wrong enumeration": (xml("qwen_xml", {"a": {"enum": 3}}, []), "enum"),
    "XML with a wrong type": (xml("qwen_xml", {"a": {"type": 3}}, []), "type"),
    "XML with a wrong length": (xml("qwen_xml", {"a": {"type": "string", "minLength": "x"}}, []), "minLength"),
    "XML with wrong alternatives": (xml("qwen_xml", {"a": {"anyOf": [3]}}, []), "boolean"),
    "XML with wrong required properties": (xml("qwen_xml", {}, "a"), "required"),  # type: ignore[arg-type]
    "XML with a pattern that looks around": (
        xml("qwen_xml", {"a": {"type": "string", "pattern": "(?=a)b"}}, []),
        "look-ahead",
    ),
    "XML with circular references": (
        xml("glm_xml", {"a": {"$ref": "#/$defs/a"}}, [], **{"$defs": {"a": {"$ref": "#/$defs/a"}}}),
        "in a circle",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_structural_tag_that_is_wrong_is_refused_with_the_reason(name: str) -> None:
    form, reason = REFUSED[name]
    with pytest.raises(InvalidRequest, match=re.escape(reason)):
        compile_tag(Words.make(), form)


@pytest.mark.parametrize("source", ["{", "[]", "{}", '{"format": 5}', '{"structures": []}'])
def test_structural_tag_that_is_not_one_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="structural tag is wrong"):
        Words.make().compile(Grammar(kind="structural_tag", source=source))


@pytest.mark.parametrize("depth", [100, 600, 10_000])
def test_structural_tag_that_is_nested_deeply_is_refused_or_matched(depth: int) -> None:
    words = Words.make()
    source = '{"format":' + '{"type":"star","content":' * depth + json.dumps(const("a")) + "}" * (depth + 1)
    try:
        compiled = words.compile(Grammar(kind="structural_tag", source=source))
    except InvalidRequest as error:
        assert depth > 100 and "nested too deeply" in str(error)
    else:
        assert words.matched(compiled, words.encode("aa"))
