"""Random texts that matchers of random JSON schemas and regular expressions allow."""

from __future__ import annotations

import json
import re

import pytest
from grammar_walks import demo_walker, make_demo_walker, schema_errors
from random_schemas import random_regex, random_schema

from eagleray.errors import InvalidRequest
from eagleray.grammars import llguidance_compiler

NUM_SCHEMAS = 60
NUM_REGEXES = 60
NUM_TEXTS = 3
KEYWORDS = re.compile(r"`\w+`|no value satisfies the JSON schema")
"""Every refusal names a keyword, or says that the schema is empty."""


@pytest.mark.parametrize("part", range(3))
def test_random_schemas_texts_validate(part):
    num_checked = 0
    for seed in range(part, NUM_SCHEMAS, 3):
        schema = random_schema(seed)
        try:
            grammar = demo_walker().compile(json=json.dumps(schema))
        except InvalidRequest as error:
            assert KEYWORDS.search(str(error)), f"seed {seed}: {error}"
            continue
        texts = [text for draw in range(NUM_TEXTS) if (text := demo_walker().draw(grammar, draw)) is not None]
        for text in texts:
            assert schema_errors(schema, text) == [], f"seed {seed}: {text!r}"
        num_checked += len(texts)
    assert num_checked > NUM_SCHEMAS / 3  # most schemas compile, and most texts end


def test_random_regexes_texts_match():
    num_checked = 0
    for seed in range(NUM_REGEXES):
        pattern = random_regex(seed)
        grammar = demo_walker().compile(regex=pattern)
        texts = [text for draw in range(NUM_TEXTS) if (text := demo_walker().draw(grammar, draw)) is not None]
        for text in texts:
            assert re.fullmatch(pattern, text), f"seed {seed}: {pattern!r} {text!r}"
        num_checked += len(texts)
    assert num_checked > NUM_REGEXES


def test_random_texts_are_those_without_groups_of_tokens(monkeypatch):
    """The groups speed up masks, and do not change them: the same draws give the same texts."""
    monkeypatch.setattr(llguidance_compiler, "SLICES", ())
    without = make_demo_walker(llguidance_compiler.LLGuidanceCompiler)
    patterns = [r"[^.]{3,80}\.", r"([^,;]+, ?)+", r".{3,60}", r"[^<>\n]{0,40}<", *map(random_regex, range(20))]
    for pattern in patterns:
        grammars = [walker.compile(regex=pattern) for walker in (demo_walker(), without)]
        for draw in range(NUM_TEXTS):
            assert demo_walker().draw(grammars[0], draw) == without.draw(grammars[1], draw), pattern
