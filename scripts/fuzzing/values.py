"""Hostile JSON values, and an encoder for values that `json.dumps` refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any


class Raw(str):
    """JSON text that is sent unchanged: numbers that Python would round, and invalid JSON."""

    __slots__ = ()


def encode(value: Any) -> bytes:
    """Encode as JSON, with the `Raw` parts of `value` inserted; lone surrogates are written as escapes."""
    return "".join(_parts(value)).encode()


def _parts(value: Any) -> list[str]:
    if isinstance(value, Raw):
        return [str(value)]
    if isinstance(value, dict):
        found = ["{"]
        for key, entry in value.items():
            found += ["," if len(found) > 1 else "", json.dumps(key), ":", *_parts(entry)]
        return [*found, "}"]
    if isinstance(value, list) and any(isinstance(entry, (Raw, dict, list)) for entry in value):
        found = ["["]
        for entry in value:
            found += ["," if len(found) > 1 else "", *_parts(entry)]
        return [*found, "]"]
    return [json.dumps(value)]


def nested(depth: int, opening: str = "[", closing: str = "]") -> Raw:
    """Return a number in nested brackets."""
    return Raw(opening * depth + "1" + closing * depth)


HOSTILE: dict[str, Callable[[random.Random], Any]] = {
    "null": lambda rng: None,
    "true": lambda rng: True,
    "zero": lambda rng: 0,
    "minus one": lambda rng: -1,
    "small int": lambda rng: rng.randrange(-5, 50),
    "2^31": lambda rng: 2**31 + rng.randrange(-1, 2),
    "2^53": lambda rng: 2**53 + rng.randrange(-1, 2),
    "2^63": lambda rng: 2**63 + rng.randrange(-1, 2),
    "2^64": lambda rng: -(2**64) + rng.randrange(-1, 2),
    "400 digits": lambda rng: Raw("1" + "0" * 400),
    "5000 digits": lambda rng: Raw("-" + "9" * 5000),
    "subnormal": lambda rng: 5e-324,
    "tiny": lambda rng: 1e-45,
    "1e400": lambda rng: Raw("1e400"),
    "1e308": lambda rng: rng.choice((1e308, -1e308)),
    "1e39": lambda rng: 1e39,
    "minus zero": lambda rng: Raw("-0.0"),
    "NaN": lambda rng: Raw("NaN"),
    "Infinity": lambda rng: Raw(rng.choice(("Infinity", "-Infinity"))),
    "fraction": lambda rng: round(rng.uniform(-3, 3), 3),
    "empty text": lambda rng: "",
    "lone surrogate": lambda rng: "a" + rng.choice(("\ud800", "\udfff", "\udc00\ud800")) + "b",
    "NUL": lambda rng: "a\x00b",
    "emoji": lambda rng: "👩🏽‍🚀" * rng.randrange(1, 200),
    "long text": lambda rng: rng.choice(("x", " ", "ab ", "\n", "é", "\u200b")) * rng.randrange(1, 100_000),
    "number as text": lambda rng: str(rng.randrange(100)),
    "template": lambda rng: "{{ ''.__class__ }}{% for i in range(10**9) %}x{% endfor %}",
    "special token": lambda rng: "<|endoftext|>" * rng.randrange(1, 300),
    "empty list": lambda rng: [],
    "ints": lambda rng: [rng.randrange(-2, 5000) for _ in range(rng.randrange(1, 2000))],
    "many ints": lambda rng: [rng.randrange(0, 4096)] * rng.randrange(1, 300_000),
    "texts": lambda rng: ["".join(rng.choices("abc 1é", k=5)) for _ in range(rng.randrange(1, 20_000))],
    "lists": lambda rng: [[1, 2, 3]] * rng.randrange(1, 3000),
    "nulls": lambda rng: [None] * rng.randrange(1, 10_000),
    "empty object": lambda rng: {},
    "wide object": lambda rng: {str(i): i for i in range(rng.randrange(1, 20_000))},
    "deep list": lambda rng: nested(rng.choice((30, 900, 5_000, 100_000))),
    "deep object": lambda rng: nested(rng.choice((30, 900, 50_000)), '{"a":', "}"),
    "unclosed": lambda rng: Raw("[" * 2000),
}
"""Makers of hostile values by name, each called with a random generator."""
