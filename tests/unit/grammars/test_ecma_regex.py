"""Expressions of JSON schemas in the syntax of Rust."""

from __future__ import annotations

import pytest

from eagleray.grammars.ecma_regex import DOT, SPACE, to_rust


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^a\.b[0-9]{2}$", r"^a\.b[0-9]{2}$"),
        ("a.c", f"a{DOT}c"),
        ("[.]", "[.]"),
        (r"\s+[\s,]\S", rf"[{SPACE}]+[[{SPACE}],][^{SPACE}]"),
        (r"[^[\]]+", r"[^\[\]]+"),
        ("[a&&b~~c]", r"[a\&\&b\~\~c]"),
        ("[+--]", r"[+-\-]"),
        (r"\cJ", r"\x0A"),
        (r"[\cA\cB]", r"[\x01\x02]"),
        (r"[\x00-\x1f]", r"[\x00-\x1f]"),
    ],
)
def test_to_rust_pattern_has_the_same_meaning(pattern, expected):
    assert to_rust(pattern) == expected


@pytest.mark.parametrize("pattern", [r"a\x01b", r"\u0000", r"\v", "a\x7f", r"[\x01]", r"\cA", "a\\u{7f}"])
def test_to_rust_single_control_character_raises(pattern):
    with pytest.raises(ValueError, match="control character"):
        to_rust(pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"), [("[]", "empty"), ("[^]", "empty"), ("[]a]", "empty"), ("a\\", "lone backslash")]
)
def test_to_rust_pattern_that_llguidance_does_not_follow_raises(pattern, reason):
    with pytest.raises(ValueError, match=reason):
        to_rust(pattern)
