from __future__ import annotations

import numpy as np
import pytest
from grammar_tokenizers import Words

from eagleray.errors import ConfigError, EagleRayError, InvalidRequest
from eagleray.grammars import compilers
from eagleray.grammars.compilers import FallbackCompiler, check_backend
from eagleray.grammars.llguidance_compiler import LLGuidanceCompiler
from eagleray.grammars.llguidance_errors import GrammarTooLarge, refusal
from eagleray.grammars.matcher import mask_words
from eagleray.messages.grammars import Grammar, GrammarKind

GRAMMAR = Grammar(kind="regex", source="a")


def accept(grammar: Grammar) -> None:
    """Check of a library that may take every grammar."""


class FakeCompiler:
    """Raises `error`, or returns itself in place of a compiled grammar."""

    def __init__(self, error: InvalidRequest | None = None) -> None:
        self.error = error
        self.num_compiled = 0
        self.is_closed = False

    def compile(self, grammar: Grammar) -> FakeCompiler:
        self.num_compiled += 1
        if self.error is not None:
            raise self.error
        return self

    def close(self) -> None:
        self.is_closed = True


def test_fallback_compiler_asks_the_second_library_for_what_the_first_refuses():
    second, loaded = FakeCompiler(), []
    first = FakeCompiler(InvalidRequest("unsupported"))
    compiler = FallbackCompiler(first, lambda: loaded.append(second) or second, check_second=accept)
    assert [compiler.compile(GRAMMAR), compiler.compile(GRAMMAR)] == [second, second]
    assert loaded == [second]
    compiler.close()
    assert first.is_closed and second.is_closed


def test_fallback_compiler_loads_no_second_library_that_is_not_needed():
    first = FakeCompiler()
    assert FallbackCompiler(first, pytest.fail, check_second=accept).compile(GRAMMAR) is first


def test_fallback_compiler_that_both_refuse_gives_the_first_reason():
    compiler = FallbackCompiler(
        FakeCompiler(InvalidRequest("first")), lambda: FakeCompiler(InvalidRequest("second")), check_second=accept
    )
    with pytest.raises(InvalidRequest, match="first"):
        compiler.compile(GRAMMAR)


@pytest.mark.parametrize("message", ["schema too large", "initial lexer configuration (grammar) too big", "fuel"])
def test_fallback_compiler_grammar_beyond_a_limit_is_not_tried_again(message: str):
    error = refusal(message)
    assert isinstance(error, GrammarTooLarge)
    with pytest.raises(GrammarTooLarge):
        FallbackCompiler(FakeCompiler(error), pytest.fail, check_second=accept).compile(GRAMMAR)


REFUSALS: list[tuple[GrammarKind, str, str]] = [
    ("regex", "a[b", "is wrong or not supported: unclosed character class in a.b$"),
    ("regex", "1 | (" + "a" * 400, r"unclosed group in 1 \| \(a{95}$"),
    ("regex", "a\\", "the regular expression is wrong: .* lone backslash$"),
    ("regex", "a" * (2**18 + 1), "^the regular expression has more than"),
    ("json_schema", '{"pattern": "["}', "is wrong or not supported: unclosed character class in .$"),
    ("json_schema", '{"properties": []}', "^the JSON schema is wrong: properties must be an object$"),
    ("json_schema", '{"type": "int"}', "`type` int, which does not exist; there are object, array"),
    ("json_schema", '{"enum": []}', "^no value satisfies the JSON schema: an `enum` or `anyOf` in it is empty$"),
    ("ebnf", 'begin: "a"', "^the grammar is wrong: Expected ::= .*; it was read as GBNF, because no line .* `start:`"),
    ("ebnf", 'start: "a" start', "^the grammar is too large: .*lexemes$"),
    ("structural_tag", '{"format": {"type": "regex", "pattern": "a\\\\"}}', "^the structural tag is wrong: .* lone"),
]


def test_llguidance_refusals_are_sentences_about_what_the_user_wrote():
    words = Words.make()
    compiler = LLGuidanceCompiler(
        words.tokenizer.to_str(), vocab_size=words.tokenizer.get_vocab_size(), eos_token_ids=[words.eos]
    )
    for kind, source, sentence in REFUSALS:
        with pytest.raises(InvalidRequest, match=sentence):
            compiler.compile(Grammar(kind=kind, source=source))


def test_fallback_compiler_does_not_load_a_library_for_what_it_refuses_by_itself():
    def check(grammar: Grammar) -> None:
        raise InvalidRequest("second")

    compiler = FallbackCompiler(FakeCompiler(InvalidRequest("first")), pytest.fail, check_second=check)
    with pytest.raises(InvalidRequest, match="first"):
        compiler.compile(GRAMMAR)


def test_fallback_compiler_library_that_cannot_be_loaded_is_tried_once():
    loads = []

    def load() -> FakeCompiler:
        loads.append(1)
        raise EagleRayError("not ready")

    compiler = FallbackCompiler(FakeCompiler(InvalidRequest("first")), load, check_second=accept)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="first"):
            compiler.compile(GRAMMAR)
    assert loads == [1]
    compiler.close()


def test_backend_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch):
    check_backend("xgrammar")
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda _: None)
    check_backend("auto")
    with pytest.raises(ConfigError, match=r"install eagleray\[xgrammar\]"):
        check_backend("xgrammar")


def test_llguidance_takes_a_tokenizer_with_added_tokens_beyond_the_vocabulary_of_the_model():
    words = Words.make(special=["<end>", "<image>"], added=["aaa"])
    size = words.tokenizer.token_to_id("<image>")
    compiler = LLGuidanceCompiler(words.tokenizer.to_str(), vocab_size=size, eos_token_ids=[words.eos])
    mask = np.zeros(mask_words(size), dtype=np.int32)
    compiler.compile(Grammar(kind="regex", source="a+")).matcher().fill_mask(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert [words.tokenizer.id_to_token(token) for token in allowed] == ["a"]
