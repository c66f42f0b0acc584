"""Free text in a grammar of llguidance, up to one of several openings.

The lexer of llguidance matches as much text as it can, so free text and the marker that ends it have to be one
terminal: a lazy one, which ends where the marker does. A marker that is a special token ends the text by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eagleray.grammars.lark_rules import (
    ANY,
    EMPTY,
    LarkRules,
    SpecialTokens,
    literal,
    one_of,
    sequence,
    text_literal,
    token_set,
)


class Opening(NamedTuple):
    """A way in which what follows a free text begins."""

    text: str
    """Text that ends the free text wherever it comes, or has to stand before `token`."""
    token: int | None
    """Special token that ends the free text; None if `text` does."""
    marker: str
    """`text`, and the content of the token."""
    rest: str
    """Expression for what comes after the marker."""
    full: str
    """Expression for the marker and what comes after it, where no free text is before it."""


class _Scope(NamedTuple):
    """Expressions of a free text: the filler is a part that ends with a text-like token, or empty."""

    text: str
    filler: str = EMPTY


class FreeText:
    """Writes free texts into rules. Free text has no special tokens but text-like ones."""

    def __init__(self, rules: LarkRules, tokens: SpecialTokens) -> None:
        self._rules = rules
        self._tokens = tokens

    def literal(self, text: str, *, before: str = EMPTY) -> str:
        """Return the expression for a marker. `before` may match nothing, and becomes one terminal with the text of the
        marker, because the lexer would otherwise give it all that it can match."""
        pieces = self._tokens.split(text)
        if before == EMPTY:
            return literal(pieces)
        if isinstance(pieces[0], str):
            return sequence([self._rules.terminal(f"{before} {text_literal(pieces[0])}"), literal(pieces[1:])])
        return sequence([before, literal(pieces)])

    def opening(self, begin: str, rest: str = EMPTY, *, trigger: str | None = None) -> Opening:
        """Return an opening that begins with the text `begin`, which is not empty, and ends with the expression `rest`.
        `trigger` is the part of `begin` that ends free text, all of it by default."""
        marker = begin if trigger is None else trigger
        text, token = marker, None
        if (found := self._tokens.find(begin)) is not None and found.start() < len(marker):
            marker, text, token = begin[: found.end()], begin[: found.start()], self._tokens.ids[found[0]]
        return Opening(
            text,
            token,
            marker,
            rest=sequence([self.literal(begin[len(marker) :]), rest]),
            full=sequence([self.literal(begin), rest]),
        )

    def to_end(self, excludes: Sequence[str], others: Sequence[Opening] = ()) -> str:
        """Return the expression for free text that ends with the completion. Text that begins one of the `others` is
        not free."""
        scope = self._scope(excludes, others)
        return sequence([scope.filler, scope.text])

    def until(self, openings: Sequence[Opening], excludes: Sequence[str], others: Sequence[Opening] = ()) -> str:
        """Return the expression for free text and then one of the openings. Text that begins one of them, or of the
        `others`, is not free."""
        scope = self._scope(excludes, [*openings, *others])
        return sequence([scope.filler, self._branches(openings, scope)])

    def shaped(self, opening: Opening, shape: str) -> str:
        """Return the expression for a text that matches the terminal `shape`, and then the opening, whose marker the
        text does not have."""
        text = self._rules.terminal(f"{shape} & ~({ANY} {text_literal(opening.marker)} {ANY})")
        return self._branches([opening], _Scope(text))

    def _branches(self, openings: Sequence[Opening], scope: _Scope) -> str:
        rests: dict[str, list[str]] = {}
        for opening in openings:
            rests.setdefault(self._end_of_text(opening, scope), []).append(opening.rest)
        return one_of(sequence([end, one_of(rest)]) for end, rest in rests.items())

    def _end_of_text(self, opening: Opening, scope: _Scope) -> str:
        """Return the expression for the free text up to the marker, and the marker."""
        if opening.token is None:
            return self._rules.rule(f"{scope.text} {text_literal(opening.text)}", is_lazy=True)
        text = scope.text
        if opening.text:
            text = self._rules.terminal(f"{scope.text} & ({ANY} {text_literal(opening.text)})")
        return sequence([text, token_set([opening.token])])

    def _scope(self, excludes: Sequence[str], openings: Sequence[Opening]) -> _Scope:
        """Return the text that has none of `excludes`, and no token of theirs or of the openings. Openings with plain
        text need no exclusion, because lazy terminals end at them."""
        named = {piece for text in excludes for piece in self._tokens.split(text) if isinstance(piece, int)}
        named |= {opening.token for opening in openings if opening.token is not None}
        spelled = (opening.marker for opening in openings if opening.token is not None)
        forbidden = sorted({text_literal(text) for text in (*excludes, *spelled)})
        text = self._rules.terminal(f"{ANY} & ~({ANY} {one_of(forbidden)} {ANY})" if forbidden else ANY)
        others = self._tokens.text_like - named
        return _Scope(text, self._rules.rule(f"({text} {token_set(others)})*") if others else EMPTY)
