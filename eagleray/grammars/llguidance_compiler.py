"""Grammars by llguidance, which parses while tokens come and so compiles in a fraction of a millisecond.

Needs no torch. Hostile grammars are bounded by counts of its parser and lexer, not by time, so that a grammar is
refused on every machine or on none.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from eagleray.errors import CheckpointError, InvalidRequest
from eagleray.grammars.lark_rules import Definition, SpecialTokens, check_end, check_num_rules
from eagleray.grammars.llguidance_errors import NAMES, GrammarTooLarge, refusal, unsupported_keywords
from eagleray.grammars.llguidance_schemas import place_of_keyword, prepare_schema
from eagleray.grammars.matcher import TokenMask, allow_only, forbid, mask_words
from eagleray.grammars.structural_tag_lark import to_lark
from eagleray.grammars.structural_tags import StructuralTag, name_field, parse_structural_tag, schemas_in
from eagleray.messages.grammars import PARAM, Grammar, GrammarKind

MAX_ITEMS_OF_SCHEMAS = 2_000
"""Largest number of the parser's items after a token. An object needs four for each optional property that may come."""
MAX_ITEMS_OF_RULES = 500
"""The same for a grammar that the user writes. If it is ambiguous or recursive to the right, its items grow with the
text, and the time of a token with their square: with 500 items 5 ms, with 2,000 more than 100 ms."""

MAX_CHARACTERS = {"regex": 2**18, "ebnf": 2**18, "choice": 2**20, "structural_tag": 2**19}
"""Bounds of sources by kind; `llguidance_schemas` has those of schemas."""

_WORDS = r"[^\x00-\x1F!-/:-@\[-\^`{-\x7F]"
_STRING = r'[^"\\\x00-\x1F\x7F]'
_LINE = r"[^\x00-\x1F\x7F]"
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(_WORDS + "{1,10}", _STRING + "{1,10}"),
    *(_WORDS + "{1,30}", _STRING + "{1,30}"),
    *(_LINE + "{1,30}", _LINE + "+"),
)
"""Groups of tokens, as expressions; a token is in the first one that matches it. If a grammar allows a whole group, its
tokens are not tried one by one. White space and strings of JSON are groups of llguidance itself. Words are tokens
without punctuation, which a class such as `[^.]` allows; lines are those that `.` allows."""

QUIET = 0

MAX_TRIED_SCHEMAS = 64
"""Number of first schemas of a structural tag among which the one that is refused is looked for."""
MAX_SHOWN_CHARS = 100
"""Number of characters before such a schema that the refusal shows."""


class LLGuidanceCompiler:
    """`vocab_size` is the model's, which may have more ids than the tokenizer has tokens. Without `eos_token_ids`, a
    matcher allows no token where nothing may follow."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raise `CheckpointError` for a tokenizer that the library cannot use. `tokenizer_json` is a tokenizer.json."""
        self._vocab_size = vocab_size
        added = msgspec.json.decode(tokenizer_json, type=_AddedTokens).added_tokens
        if any(token.id >= vocab_size for token in added):
            tokenizer_json = _without_added_from(vocab_size, tokenizer_json)
            added = [token for token in added if token.id < vocab_size]
        self._ends = _Ends.of(eos_token_ids, added)
        try:
            self._tokenizer = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=list(self._ends.token_ids), slices=list(SLICES)
            )
        except ValueError as error:
            raise CheckpointError(f"structured outputs cannot use this model's tokenizer: {error}") from None
        self._special_tokens = _special_tokens(added, self._tokenizer)

    def compile(self, grammar: Grammar) -> LLGuidanceGrammar:
        """See `GrammarCompiler.compile`."""
        _check_size(grammar)
        try:
            return self._compile(grammar)
        except GrammarTooLarge:
            raise
        except InvalidRequest as error:
            is_named = grammar.kind != "structural_tag" or error.param != PARAM
            raise error if is_named else self._refusal_of_part(grammar) or error from None

    def close(self) -> None:
        """Do nothing: the compiler is memory alone."""

    def _refusal_of_part(self, grammar: Grammar) -> InvalidRequest | None:
        """Return the refusal of the first schema of a structural tag that is refused by itself, if it has a field of
        its own or stands behind a text."""
        placed = schemas_in(parse_structural_tag(grammar.source, PARAM))
        told_apart = (one for one in placed if one.before or one.form.param)
        for before, form in itertools.islice(told_apart, MAX_TRIED_SCHEMAS):
            # As a schema alone it is refused by a shorter message.
            kind: GrammarKind = "json_schema" if form.style == "json" else "structural_tag"
            source = msgspec.json.encode(form.json_schema if form.style == "json" else StructuralTag(form)).decode()
            try:
                self._compile(Grammar(kind=kind, source=source, whitespace=grammar.whitespace))
            except InvalidRequest as error:
                if form.param:
                    return error if error.param == form.param else name_field(error, form.param)
                return InvalidRequest(f"behind {before[-MAX_SHOWN_CHARS:]!r}, {error}", param=PARAM)
        return None

    def _compile(self, grammar: Grammar) -> LLGuidanceGrammar:
        try:
            text, has_rules = self._definition(grammar)
            limits = _limits(MAX_ITEMS_OF_RULES if has_rules else MAX_ITEMS_OF_SCHEMAS)
            matcher = LLMatcher(self._tokenizer, text, log_level=QUIET, limits=limits)
        except InvalidRequest:
            raise
        except ValueError as error:
            raise refusal(str(error), grammar.kind) from None
        if matcher.is_error():
            message = matcher.get_error()
            raise refusal(message, grammar.kind, _place_of_unsupported(message, grammar))
        compiled = LLGuidanceGrammar(matcher, self._ends)
        # The lexer is built when it is first used, so a limit may be hit only here, and so is a grammar without a text.
        compiled.check_first_tokens(self._vocab_size, grammar.kind)
        return compiled

    def _definition(self, grammar: Grammar) -> Definition:
        """Return the grammar in the form of the library. Raises ValueError."""
        match grammar.kind:
            case "json_schema":
                schema = prepare_schema(grammar.source, grammar.whitespace)
                return Definition(LLMatcher.grammar_from_json_schema(schema))
            case "choice":
                texts = " | ".join(map(json.dumps, json.loads(grammar.source)))
                one_terminal = f"start: T\nT: {texts}"  # is parsed much faster
                return Definition(LLMatcher.grammar_from_lark(one_terminal))
            case "regex":
                check_end(grammar.source)
                return Definition(grammar_from("regex", grammar.source))
            case "ebnf":
                return Definition(grammar_from("grammar", grammar.source), has_rules=True)
            case "structural_tag":
                form = parse_structural_tag(grammar.source, PARAM)
                return to_lark(form, self._special_tokens, grammar.whitespace, PARAM)


@dataclass(frozen=True)
class _Ends:
    """Tokens that end a text for the library."""

    token_ids: frozenset[int]
    are_generated: bool
    """Whether the model generates them. If not, they stand in for its missing end-of-sequence token."""

    @classmethod
    def of(cls, eos_token_ids: Sequence[int], added: Sequence[_AddedToken]) -> _Ends:
        if eos_token_ids:
            return cls(frozenset(eos_token_ids), are_generated=True)
        if special := [token.id for token in added if token.special]:
            return cls(frozenset(special[:1]), are_generated=False)
        raise CheckpointError("structured outputs need a tokenizer that has an end-of-sequence or a special token")


def _limits(max_items: int) -> LLParserLimits:
    """Return the limits of the parser, with this number of items after a token. With these, the costliest grammars of
    the tests are refused within 0.1 s and 20 MB."""
    return LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=max_items,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


class LLGuidanceGrammar:
    num_bytes = 0
    """Not reported. It is in proportion to the source."""

    def __init__(self, matcher: LLMatcher, ends: _Ends) -> None:
        self._initial = matcher
        self._ends = ends

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._initial.deep_copy(), self._ends)

    def check_first_tokens(self, vocab_size: int, kind: GrammarKind) -> None:
        """Raise `InvalidRequest` if no text can be generated, or if a limit is hit at the first token or the second."""
        mask = np.zeros(mask_words(vocab_size), dtype=np.int32)
        first = self._initial
        _compute_mask(first, mask, kind)
        if not mask.any() or (first.is_stopped() and not first.is_accepting()):
            raise InvalidRequest("the grammar matches no text: no token can come first", param=PARAM)
        forbid(mask, self._ends.token_ids)
        if mask.any() and not first.is_stopped():
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            second = first.deep_copy()
            second.consume_token(int(bits.argmax()))
            _compute_mask(second, mask, kind)


class LLGuidanceMatcher:
    def __init__(self, matcher: LLMatcher, ends: _Ends) -> None:
        self._matcher = matcher
        self._ends = ends
        self._mask: TokenMask | None = None
        """The last mask, which is usually also the next one."""
        self._address = 0

    @property
    def failure(self) -> str | None:
        if not self._matcher.is_error():
            return None
        return f"the grammar of the completion failed: {_first_line(self._matcher.get_error())}"

    @property
    def is_complete(self) -> bool:
        """See `Matcher.is_complete`."""
        return self._matcher.is_accepting()

    def fill_mask(self, mask: TokenMask) -> None:
        """See `Matcher.fill_mask`."""
        if self._matcher.is_stopped():
            allow_only(mask, self._ends.token_ids if self.is_complete else ())
        else:
            if mask is not self._mask:
                self._mask, self._address = mask, _address(mask)
            self._matcher.unsafe_compute_mask_ptr(self._address, mask.nbytes)
        if not self._ends.are_generated:
            forbid(mask, self._ends.token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher.accept`."""
        tokens = [token_id for token_id in token_ids if token_id not in self._ends.token_ids]
        if tokens and not self._matcher.is_stopped():
            self._matcher.consume_tokens(tokens)

    def copy(self) -> LLGuidanceMatcher:
        """See `Matcher.copy`."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._ends)


def _compute_mask(matcher: LLMatcher, mask: TokenMask, kind: GrammarKind) -> None:
    """Compute the mask unless the text has ended. Raises `InvalidRequest` if a limit is hit."""
    if not matcher.is_stopped():
        matcher.unsafe_compute_mask_ptr(_address(mask), mask.nbytes)
    if matcher.is_error():
        raise refusal(matcher.get_error(), kind)


def _address(mask: TokenMask) -> int:
    """Return the address of the mask, in a fraction of the time of `mask.ctypes.data`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mask.data))


def _check_size(grammar: Grammar) -> None:
    """Raise `GrammarTooLarge`."""
    most = MAX_CHARACTERS.get(grammar.kind)
    if most is not None and len(grammar.source) > most:
        name = NAMES.get(grammar.kind, "the grammar")
        raise GrammarTooLarge(f"{name} has more than {most} characters", param=PARAM)
    if grammar.kind == "ebnf":
        check_num_rules(grammar.source)


def _place_of_unsupported(message: str, grammar: Grammar) -> str | None:
    """Return where a schema has the first of the keywords that a message names as unsupported, or None."""
    keywords = unsupported_keywords(message)
    if not keywords or grammar.kind != "json_schema":
        return None
    place = place_of_keyword(json.loads(grammar.source), keywords)
    return place and place[-MAX_SHOWN_CHARS:]


def _first_line(message: str) -> str:
    return message.strip().split("\n", 1)[0]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken]


def _without_added_from(vocab_size: int, tokenizer_json: str) -> str:
    """Return a tokenizer without the added tokens that the model cannot generate, which the library does not take."""
    tokenizer = msgspec.json.decode(tokenizer_json)
    vocabulary = tokenizer["model"]["vocab"]
    kept = []
    for token in tokenizer["added_tokens"]:
        if token["id"] < vocab_size:
            kept.append(token)
        elif isinstance(vocabulary, dict):
            vocabulary.pop(token["content"], None)
    tokenizer["added_tokens"] = kept
    return msgspec.json.encode(tokenizer).decode()


def _special_tokens(added: Sequence[_AddedToken], tokenizer: LLTokenizer) -> SpecialTokens:
    """Return the tokens that the library matches by id only: special tokens, and tokens of the form <text>."""
    special = [token for token in added if tokenizer.is_special_token(token.id)]
    return SpecialTokens(
        {token.content: token.id for token in special},
        text_like=frozenset(token.id for token in special if not token.special),
    )
