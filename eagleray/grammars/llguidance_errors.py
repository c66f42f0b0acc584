"""Sentences for users in place of llguidance's messages."""

from __future__ import annotations

import re

from eagleray.errors import InvalidRequest
from eagleray.messages.grammars import PARAM, GrammarKind

EXPRESSIONS = "`pattern`, `regex` or `whitespace_pattern`"
"""Fields with regular expressions."""

UNSUPPORTED_KEYWORDS = r"Unimplemented keys: \[(?P<keys>[^\]]*)\]"

SENTENCES = (
    (
        UNSUPPORTED_KEYWORDS,
        "the JSON schema has keywords that are not supported: {keys}{place}; leave them out, or check them after the "
        "answer has come",
    ),
    (
        "oneOf constraints are not supported",
        "the JSON schema has a `oneOf` with alternatives that may match at once; use `anyOf`, or give each of them a "
        "required property with a `const` of its own",
    ),
    (
        "min/maxProperties only supported",
        "the JSON schema has `minProperties` or `maxProperties` in an object that has optional `properties`, which is "
        "not supported",
    ),
    (
        "patternProperty regexes (?P<patterns>.*) are not disjoint",
        "the JSON schema has `patternProperties` that may match the same name: {patterns}",
    ),
    (
        "is not present in a registry|(Anchor|Pointer) .* does not exist|circular references with sibling keys",
        "the JSON schema has a `$ref` that is not supported, because it leads out of the schema, to nothing, or back "
        "to itself beside other keywords: {message}",
    ),
    ("Failed to generate regex for", "the JSON schema has a `minimum` or `maximum` beyond 64 bits: {message}"),
    ("lookarounds not supported yet", f"an expression in {EXPRESSIONS} looks around, which is not supported"),
    (
        r"regex parse error: (?P<expression>.*?)( \^+)? error: (?P<reason>.*?)( [0-9]+ \| .*)?$",
        f"an expression in {EXPRESSIONS} is wrong or not supported: {{reason}} in {{expression}}",
    ),
    ("regex parse error", f"an expression in {EXPRESSIONS} is wrong or not supported: {{message}}"),
    ("Unsatisfiable schema: anyOf is empty", "no value satisfies the JSON schema: an `enum` or `anyOf` in it is empty"),
    ("Unsatisfiable schema: (?P<reason>.*)", "no value satisfies the JSON schema: {reason}"),
    (
        r"Invalid type: (?P<type>\S+)",
        "the JSON schema has the `type` {type}, which does not exist; there are object, array, string, number, "
        "integer, boolean and null",
    ),
    (
        "from GBNF to Lark: (?P<reason>.*)",
        "the grammar is wrong: {reason}; it was read as GBNF, because no line of it begins with `start:` as in Lark",
    ),
    ("NoExtension", "the grammar matches no text that can be generated"),
)
"""Expressions that are searched for in a message, and the sentence for the user. The first one is taken."""

LIMITS = re.compile(r"too (large|many|big|complex|deeply)|max is|fuel|exhausted|limit", re.IGNORECASE)
"""Matches messages about a limit of the library."""

NAMES = {"json_schema": "the JSON schema", "regex": "the regular expression", "choice": "the list of choices"}
"""Names of grammars for users, by kind."""

MAX_MESSAGE = 300
MAX_PART = 100


class GrammarTooLarge(InvalidRequest):
    """A grammar is beyond a limit."""


def unsupported_keywords(message: str) -> list[str]:
    """Return the keywords of a schema that a message of llguidance names as unsupported."""
    found = re.search(UNSUPPORTED_KEYWORDS, message)
    return re.findall('"([^"]+)"', found["keys"]) if found else []


def refusal(message: str, kind: GrammarKind | None = None, place: str | None = None) -> InvalidRequest:
    """Return the error for a grammar of this kind that llguidance refuses with this message. `place` is where a schema
    has the first keyword that is not supported."""
    joined = " ".join(message.replace("<non-verbose/>", "").split())
    whole = joined[:MAX_MESSAGE]
    for expression, sentence in SENTENCES:
        if found := re.search(expression, joined):
            parts = {name: part.replace('"', "`")[:MAX_PART] for name, part in found.groupdict().items()}
            parts["place"] = f", first at {place}" if place else ""
            return InvalidRequest(sentence.format(message=whole, **parts), param=PARAM)
    name = NAMES.get(kind or "", "the grammar")
    if LIMITS.search(whole):
        return GrammarTooLarge(f"{name} is too large: {whole}", param=PARAM)
    return InvalidRequest(f"{name} is wrong: {whole}", param=PARAM)
