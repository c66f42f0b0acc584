"""The regular expressions that xgrammar follows.

xgrammar drops parts of an expression, with a warning in its log or without one, and then lets texts pass that the
expression forbids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from eagleray.errors import InvalidRequest
from eagleray.grammars.ecma_regex import TOKENS
from eagleray.messages.grammars import PARAM

ESCAPES = frozenset("dDwWsSbBtnrfvxupPk")
"""Letters behind a backslash that the library follows or refuses. It takes others for themselves."""

IN_LARK = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*" | //[^\n]* | \#[^\n]*         # texts and comments, which may have slashes
    | /(?P<regex>(?:\\.|[^/\\\n])+)/
    """,
    re.VERBOSE,
)


def check_regex(expression: str) -> None:
    """Raise `InvalidRequest` for an expression that the library would not follow."""
    if part := ignored_part(expression):
        raise InvalidRequest(
            f"xgrammar does not follow {part} where it stands in a regular expression: leave it out, or use the "
            "backend llguidance",
            param=PARAM,
        )


def regexes_of_lark(grammar: str) -> Iterator[str]:
    """Yield the regular expressions of a grammar in Lark's form."""
    for found in IN_LARK.finditer(grammar):
        if found["regex"]:
            yield found["regex"]


def ignored_part(expression: str) -> str | None:
    """Return the first part of an expression that the library drops or takes for another text: an anchor inside it, an
    unknown escape, a group that looks around or sets flags."""
    tokens = TOKENS.findall(expression)
    in_class = False
    for index, token in enumerate(tokens):
        if token == "\\" or (len(token) == 2 and token[0] == "\\" and token[1].isalpha() and token[1] not in ESCAPES):
            return str(token)
        if in_class:
            in_class = token != "]"
        elif token in ("[", "[^"):
            in_class = True
        elif (token == "^" and index > 0) or (token == "$" and index < len(tokens) - 1):
            return str(token)
        elif token == "(" and re.match(r"\?(?!:|<\w)", "".join(tokens[index + 1 : index + 4])):
            return "".join(tokens[index : index + 3])
    return None
