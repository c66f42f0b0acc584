"""Rules of a grammar in Lark's syntax as llguidance reads it, written one after the other.

An expression is the text that may stand on the right side of a rule. Terminals, which the lexer matches at once, have
upper-case names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llguidance import LLMatcher, grammar_from

from eagleray.grammars.llguidance_errors import GrammarTooLarge
from eagleray.grammars.llguidance_schemas import prepare_schema
from eagleray.messages.grammars import PARAM

Piece = str | int
"""Text, or the id of a special token."""

ANY = "/(?s:.*)/"
EMPTY = '""'


MAX_COLONS = 2_000
"""Bound of the rules of a user's grammar, each of which has a colon. llguidance compiles a rule within the one that
names it, so a long chain of rules needs a large stack."""


MAX_SHOWN = 100
"""Number of characters of an expression that an error shows."""
MAX_WRITTEN = 2**21
"""Bound of the characters of rules, equal ones included: where alternatives follow alternatives, there are many."""


class Definition(NamedTuple):
    """A grammar in the form of the library."""

    text: str
    has_rules: bool = False
    """Whether the user wrote rules of it, which may be ambiguous."""


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that no text matches: a grammar has to name them."""

    ids: dict[str, int]
    text_like: frozenset[int] = frozenset()
    """Ids of the ones that a tokenizer does not declare as special. Free text may have them, as it may have any text of
    their form."""
    _pattern: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        longest_first = sorted(self.ids, key=len, reverse=True)
        object.__setattr__(self, "_pattern", re.compile("|".join(map(re.escape, longest_first)) or r"(?!)"))

    def find(self, text: str) -> re.Match[str] | None:
        """Return the first special token in a text."""
        return self._pattern.search(text)

    def split(self, text: str) -> list[Piece]:
        """Split a text into special tokens and the texts between them."""
        pieces: list[Piece] = []
        end = 0
        for found in self._pattern.finditer(text):
            pieces += [text[end : found.start()], self.ids[found[0]]]
            end = found.end()
        return [piece for piece in [*pieces, text[end:]] if piece != ""]


class LarkRules:
    """Rules with names. Equal rules have one name."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}  # by options and expression
        self._grammars: list[dict[str, str]] = []
        self._num_written = 0

    def rule(self, expression: str, *, is_lazy: bool = False) -> str:
        """Add a rule and return its name. A lazy one has to match a terminal, and ends at its first match."""
        return self._name("r", "[lazy]" if is_lazy else "", expression)

    def terminal(self, expression: str) -> str:
        """Add a terminal and return its name."""
        return self._name("T", "", expression)

    def json_schema(self, schema: dict[str, Any], whitespace: str) -> str:
        """Return the expression for JSON by this schema. `whitespace`: see `Grammar`. Raises `InvalidRequest`."""
        return self.rule(f"%json {prepare_schema(json.dumps(schema), whitespace)}")

    def regex(self, pattern: str) -> str:
        """Return the expression for a regular expression. Raises ValueError."""
        return self.rule(regex_literal(pattern))

    def grammar(self, grammar: str) -> str:
        """Return the expression for a grammar in Lark's or GBNF's form. Raises ValueError."""
        check_num_rules(grammar)
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": grammar_from("grammar", grammar)})
        return self.rule(f"@{name}")

    def to_grammar(self, start: str) -> Definition:
        """Return the grammar whose texts are those of the expression `start`."""
        rules = [f"{name}{options}: {expression}" for (options, expression), name in self._names.items()]
        first = {"lark_grammar": "\n".join([f"start: {start}", *rules])}
        return Definition(json.dumps({"grammars": [first, *self._grammars]}), has_rules=bool(self._grammars))

    def _name(self, prefix: str, options: str, expression: str) -> str:
        self._num_written += len(expression)
        if self._num_written > MAX_WRITTEN:
            raise GrammarTooLarge("the structural tag is too large, because its parts multiply", param=PARAM)
        return self._names.setdefault((options, expression), f"{prefix}{len(self._names)}")


def check_num_rules(grammar: str) -> None:
    """Raise `GrammarTooLarge` for a grammar in Lark's or GBNF's form that has too many rules."""
    if grammar.count(":") > MAX_COLONS:
        raise GrammarTooLarge(f"the grammar has more than {MAX_COLONS} colons, so it has too many rules", param=PARAM)


def text_literal(text: str) -> str:
    """Return the expression for a text without special tokens."""
    return json.dumps(text)


def regex_literal(pattern: str) -> str:
    """Return the expression for a regular expression. Raises ValueError."""
    check_end(pattern)
    grammar: str = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return grammar.removeprefix("start: ")


def check_end(pattern: str) -> None:
    """Raise ValueError for a regular expression that ends with a lone backslash, which llguidance would drop."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError(f"the expression {pattern[-MAX_SHOWN:]} ends with a lone backslash")


def token_set(token_ids: Iterable[int]) -> str:
    """Return the expression for one of these tokens."""
    return f"<[{','.join(map(str, sorted(token_ids)))}]>"


def literal(pieces: Sequence[Piece]) -> str:
    """Return the expression for special tokens and texts."""
    return sequence(token_set([piece]) if isinstance(piece, int) else text_literal(piece) for piece in pieces)


def sequence(expressions: Iterable[str]) -> str:
    """Return the expression for all of these, one after the other."""
    return " ".join(expression for expression in expressions if expression != EMPTY) or EMPTY


def one_of(expressions: Iterable[str]) -> str:
    """Return the expression for any of these. Raises ValueError if there are none."""
    different = list(dict.fromkeys(expressions))
    if not different:
        raise ValueError("there are no alternatives")
    return different[0] if len(different) == 1 else f"({' | '.join(different)})"
