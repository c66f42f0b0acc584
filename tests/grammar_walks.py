"""Texts that matchers allow: random ones, drawn token by token without a model, and whether a given text is one."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Sequence
from datetime import date, time
from decimal import Decimal, InvalidOperation
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from uuid import UUID

import numpy as np
from jsonschema import Draft202012Validator, FormatChecker, ValidationError, validators
from tokenizers import Tokenizer

from eagleray.config.resolve import DEMO_MODEL_DIR
from eagleray.grammars.llguidance_compiler import LLGuidanceCompiler
from eagleray.grammars.matcher import CompiledGrammar, GrammarCompiler, Matcher, mask_words
from eagleray.messages.structured_outputs import StructuredOutputsParams

CLOSING = re.compile(r'["\]},:0-9]{1,3}')
"""Tokens that lead to the end of a JSON text."""


MAX_DIGITS = 5000


class Walker:
    """Draws texts that grammars of one tokenizer allow, and follows given ones."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer, eos_token_id: int, vocab_size: int) -> None:
        self._compiler = compiler
        self._tokenizer = tokenizer
        self._eos_token_id = eos_token_id
        self._vocab_size = vocab_size
        texts = [tokenizer.decode([token_id]) for token_id in range(vocab_size)]
        self._closing = np.array([CLOSING.fullmatch(text) is not None for text in texts])

    def compile(self, **constraint: Any) -> CompiledGrammar:
        """Compile a constraint as a user writes it. Raises `InvalidRequest`."""
        return self._compiler.compile(StructuredOutputsParams(**constraint).to_grammar())

    def draw(self, grammar: CompiledGrammar, seed: int, max_tokens: int = 200) -> str | None:
        """Return a random text, or None if `max_tokens` tokens do not end it."""
        rng = random.Random(seed)
        matcher = grammar.matcher()
        token_ids: list[int] = []
        while len(token_ids) < max_tokens:
            allowed = self._allowed(matcher)
            assert allowed.any(), f"no token is allowed after {self._tokenizer.decode(token_ids)!r}"
            if allowed[self._eos_token_id] and (allowed.sum() == 1 or rng.random() < 0.4):
                return self._tokenizer.decode(token_ids)
            allowed[self._eos_token_id] = False
            if rng.random() < 0.5 and (allowed & self._closing).any():
                allowed &= self._closing
            token_ids.append(rng.choice(np.flatnonzero(allowed).tolist()))
            matcher.accept(token_ids[-1:])
        return None

    def accepts(self, grammar: CompiledGrammar, text: str) -> bool:
        """Whether the grammar allows the text, up to its end."""
        return self._may_end(grammar, self._tokenizer.encode(text, add_special_tokens=False).ids) is True

    def accepts_beginning(self, grammar: CompiledGrammar, token_ids: Sequence[int]) -> bool:
        """Whether the grammar allows a text that begins by these tokens."""
        return self._may_end(grammar, token_ids) is not None

    def _may_end(self, grammar: CompiledGrammar, token_ids: Sequence[int]) -> bool | None:
        """Return whether a text may end after these tokens, or None if one of them is forbidden."""
        matcher = grammar.matcher()
        for token_id in token_ids:
            if not self._allowed(matcher)[token_id]:
                return None
            matcher.accept([token_id])
        return bool(self._allowed(matcher)[self._eos_token_id])

    def _allowed(self, matcher: Matcher) -> np.ndarray:
        """Return whether each token may come next, bool [vocab_size]."""
        mask = np.zeros(mask_words(self._vocab_size), dtype=np.int32)
        matcher.fill_mask(mask)
        assert matcher.failure is None
        return np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)


@functools.cache
def demo_walker() -> Walker:
    """Return the walker of the embedded model's tokenizer, with grammars by llguidance."""
    return make_demo_walker(LLGuidanceCompiler)


def make_demo_walker(make_compiler: Callable[..., GrammarCompiler]) -> Walker:
    """Return a walker of the embedded model's tokenizer."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    config = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
    vocab_size, eos_token_id = config["vocab_size"], config["eos_token_id"]
    compiler = make_compiler(tokenizer.to_str(), vocab_size=vocab_size, eos_token_ids=[eos_token_id])
    return Walker(compiler, tokenizer, eos_token_id, vocab_size)


def schema_errors(schema: Any, text: str) -> list[str]:
    """Return the reasons why a JSON text does not follow the schema. Numbers are compared exactly, as written."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    try:
        value = json.loads(text, parse_float=_number)
    except ValueError as error:
        return [str(error)]
    return [error.message for error in _Validator(exact, format_checker=_FORMATS).iter_errors(value)]


def _number(text: str) -> Decimal:
    """Return the number, or one that is infinite if its exponent has more digits than Python computes with."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal(float(text))


def _is_search(validator: Any, pattern: str, instance: Any, schema: Any) -> Any:
    """Search as ECMA-262 does, whose classes have letters and digits of ASCII alone."""
    if isinstance(instance, str) and re.search(pattern, instance, re.ASCII) is None:
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _is_multiple(validator: Any, divisor: Any, instance: Any, schema: Any) -> Any:
    """Divide exactly, where the package's own check rounds. Numbers of thousands of digits are not checked."""
    is_number = isinstance(instance, int | Decimal) and not isinstance(instance, bool)
    if is_number and Decimal(instance).is_finite() and Decimal(instance).adjusted() < MAX_DIGITS:
        numerator, denominator = Decimal(instance).as_integer_ratio()
        by_numerator, by_denominator = Decimal(divisor).as_integer_ratio()
        if numerator * by_denominator % (denominator * by_numerator):
            yield ValidationError(f"{instance} is not a multiple of {divisor}")


_Validator = validators.extend(Draft202012Validator, {"pattern": _is_search, "multipleOf": _is_multiple})
_FORMATS = FormatChecker(formats=())


def _time(text: str) -> None:
    found = re.fullmatch(r"(\d\d:\d\d:\d\d)(\.\d+)?([zZ]|[+-]\d\d:\d\d)", text)
    if found is None:
        raise ValueError(text)
    time.fromisoformat(found[1])


def _date_time(text: str) -> None:
    date.fromisoformat(text[:10])
    _time(text[11:])


for _name, _parse in {
    "date": date.fromisoformat,
    "time": _time,
    "date-time": _date_time,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "uuid": UUID,
}.items():
    _FORMATS.checks(_name, raises=ValueError)(
        lambda value, parse=_parse: not isinstance(value, str) or (parse(value), True)[1]
    )
