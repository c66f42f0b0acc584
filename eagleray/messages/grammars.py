"""The grammar of a completion, as it travels from the client to the worker that samples."""

from __future__ import annotations

from typing import Literal

import msgspec

PARAM = "structured_outputs"
"""Name of the field that errors about a grammar name. A server knows by which field the user gave it."""

MAX_PREPARED_GRAMMARS = 128
MAX_PREPARED_BYTES = 2 * 2**20
"""Largest number of grammars that a scheduler counts as compiled, and largest size of their sources together."""
MAX_PREPARED_COMPILED_BYTES = 256 * 2**20
"""Largest size of these grammars as they are compiled, of those whose library reports it."""

GrammarKind = Literal["json_schema", "regex", "choice", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The set of texts that a completion may be. Equal grammars have equal fields, so that one is compiled once."""

    kind: GrammarKind
    source: str
    """The schema as JSON, the regular expression, the list of choices as JSON, the rules of an EBNF grammar, or the
    structural tag as JSON."""
    whitespace: str = ""
    """Regular expression of the white space between elements of JSON; empty allows none."""
