"""xgrammar in its process. One process serves all tests, since its imports take seconds."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import numpy as np
import pytest
from grammar_tokenizers import WHITESPACE, Words
from tokenizers import Tokenizer, decoders, models

from eagleray.errors import CheckpointError, InvalidRequest
from eagleray.grammars.matcher import mask_words
from eagleray.grammars.xgrammar_compiler import XGrammarCompiler
from eagleray.grammars.xgrammar_process import _read, _write
from eagleray.messages.grammars import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
REGEX_TAG = {"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": r"a\Z"}]}}


@pytest.fixture(scope="module")
def words() -> Iterator[Words]:
    words = Words.make()
    tokenizer = words.tokenizer
    compiler = XGrammarCompiler(tokenizer.to_str(), vocab_size=tokenizer.get_vocab_size(), eos_token_ids=[words.eos])
    yield Words(tokenizer, compiler, words.eos)
    compiler.close()


@pytest.mark.parametrize(
    ("grammar", "matching", "others"),
    [
        (
            Grammar(kind="json_schema", source=json.dumps(SCHEMA), whitespace=WHITESPACE),
            ['{"a": 1}', '{\n  "a": 12 }'],
            ['{"a": "x"}', '{"a": 1', '{"b": 1}'],
        ),
        (Grammar(kind="json_schema", source=json.dumps(SCHEMA)), ['{"a":1}'], ['{"a": 1}']),
        (Grammar(kind="regex", source="[ab]{2,3}c?"), ["ab", "aaac"], ["a", "aaaa"]),
        (Grammar(kind="choice", source='["yes", "no\\"x"]'), ["yes", 'no"x'], ["no", "ye"]),
        (Grammar(kind="ebnf", source='root ::= "x" [0-9]+'), ["x12"], ["x", "12"]),
        (Grammar(kind="ebnf", source='start: "x" /[0-9]+/'), ["x12"], ["x"]),
        (
            Grammar(kind="structural_tag", source=json.dumps(TAG)),
            ["free", 'a <f>{"a": 1}</f> b'],
            ['<f>{"a": "b"}</f>'],
        ),
    ],
)
def test_xgrammar_matches_the_texts_of_a_grammar(
    words: Words, grammar: Grammar, matching: list[str], others: list[str]
):
    compiled = words.compile(grammar)
    assert compiled.num_bytes > 0
    for text in matching:
        assert words.matched(compiled, words.encode(text, by_byte=True)), text
    for text in others:
        assert not words.accepted(compiled, words.encode(text)), text


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(kind="json_schema", source='{"not": {}}', whitespace=WHITESPACE), "`not`"),
        (Grammar(kind="json_schema", source="{", whitespace=WHITESPACE), "not valid JSON"),
        (Grammar(kind="json_schema", source="{}", whitespace=" +"), "`whitespace_pattern`"),
        (Grammar(kind="regex", source="(?=a)b"), r"xgrammar does not follow \(\?= where it stands"),
        (Grammar(kind="regex", source="a$b"), r"xgrammar does not follow \$"),
        (Grammar(kind="regex", source=r"(a)\1"), "xgrammar refuses the grammar: .*Backreference"),
        (Grammar(kind="ebnf", source='start: "/a$b/" X // /a$b/\nX: /[a]\\/c^/'), r"xgrammar does not follow \^"),
        (Grammar(kind="structural_tag", source=json.dumps(REGEX_TAG)), r"xgrammar does not follow \\Z"),
        (Grammar(kind="ebnf", source='root ::= "a" b'), 'Rule "b" is not defined'),
        (Grammar(kind="structural_tag", source=json.dumps(TAG).replace("integer", "frac")), "refuses the grammar"),
    ],
)
def test_xgrammar_refuses_a_grammar_by_a_sentence(words: Words, grammar: Grammar, reason: str):
    with pytest.raises(InvalidRequest, match=reason):
        words.compile(grammar)


def test_xgrammar_token_that_the_grammar_forbids_is_a_failure_of_its_matcher_alone(words: Words):
    compiled = words.compile(Grammar(kind="regex", source="ab"))
    broken, other = compiled.matcher(), compiled.matcher()
    [a] = words.encode("a")
    broken.accept([a, a])
    other.accept([a])
    assert f"the token {a}" in (broken.failure or "")
    broken.fill_mask(np.zeros(mask_words(words.tokenizer.get_vocab_size()), dtype=np.int32))
    [b] = words.encode("b")
    copy = other.copy()
    copy.accept([b])
    assert copy.is_complete and broken.copy().failure == broken.failure
    assert not other.is_complete and other.failure is None and words.allows(other, b)


def test_xgrammar_refuses_a_tokenizer_whose_tokens_it_would_take_for_other_texts():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="a decoder ByteLevel or ByteFallback, but the tokenizer has WordPiece"):
        XGrammarCompiler(tokenizer.to_str(), vocab_size=3, eos_token_ids=[0])


@pytest.mark.slow
def test_xgrammar_process_that_was_killed_refuses_no_grammar(words: Words):
    process = words.compiler._process._process
    process.kill()
    process.wait()
    assert words.compile(Grammar(kind="regex", source="b+"))


def test_xgrammar_message_that_ends_in_the_middle_is_none():
    whole = io.BytesIO()
    _write(whole, b"abc")
    data = whole.getvalue()
    assert _read(io.BytesIO(data)) == b"abc"
    assert [_read(io.BytesIO(data[:size])) for size in range(len(data))] == [None] * len(data)


@pytest.mark.slow
def test_xgrammar_hostile_grammar_ends_its_process_and_the_next_one_starts_another(words: Words):
    properties = {f"p{index}": {"type": "string", "pattern": "[a-z]{100}"} for index in range(5000)}
    hostile = json.dumps({"type": "object", "properties": properties, "additionalProperties": False})
    with pytest.raises(InvalidRequest, match="more than 1 s or 256 MiB"):
        words.compile(Grammar(kind="json_schema", source=hostile, whitespace=WHITESPACE))
    assert words.compile(Grammar(kind="regex", source="a+"))
