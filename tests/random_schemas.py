"""Random JSON schemas and regular expressions, the same ones for a seed.

They use what structured outputs support, nested and combined. A schema may have no valid value, and may be one that the
library refuses, for example an `allOf` of patterns that it cannot intersect.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "tags", "größe", "a b", "x/y", 'q"t', "line\nbreak", "value", "next", "kind", "n_1")
PATTERNS = (
    "^[a-z]{2,5}$", "^[A-Z][a-z]+( [A-Z][a-z]+)?$", r"^\d{3}-\d{4}$", "ab+c", r"^\w+@\w+\.(com|org)$",
    "^(on|off|auto)$", r"^[^\s]{1,8}$", "^a|b$", r"[0-9]$", r"^\+?[1-9]\d{1,6}$", "^$|^[xyz]$", "é|ß",
    r"^v\d+(\.\d+){0,2}$",
)  # fmt: skip
KEY_PATTERNS = ("^x_", "^s_[a-z]+$", "_id$", "^[0-9]{1,3}$")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


class _Schemas:
    """Draws one schema. `names` are those of definitions that it may refer to."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names: list[str] = []

    def draw(self) -> Schema:
        self.names = [f"d{number}" for number in range(self.rng.choice((0, 0, 1, 2)))]
        schema = self.object(3) if self.rng.random() < 0.6 else self.any(3)
        if self.names:
            schema["$defs"] = {name: self.object(1) for name in self.names}
        return schema

    def any(self, depth: int) -> Schema:
        """Return a schema that is nested at most `depth` times."""
        kinds: list[Callable[[int], Schema]] = [self.string, self.integer, self.number, self.literal, self.plain]
        if depth > 0:
            kinds += [self.object, self.array, self.array, self.choice, self.nullable, self.conjunction]
            kinds += [self.reference] * bool(self.names)
        schema = self.rng.choice(kinds)(depth)
        if self.rng.random() < 0.1:
            schema |= {"title": "T", "description": 'Something "quoted".', "default": None}
        return schema

    def maybe(self, probability: float = 0.4) -> bool:
        return self.rng.random() < probability

    def plain(self, depth: int) -> Schema:
        """Return a type alone, several types, or any value."""
        if self.maybe(0.15):
            return {}
        if self.maybe(0.2):
            return {"type": self.rng.sample(("string", "integer", "boolean", "null"), 2)}
        return {"type": self.rng.choice(("boolean", "null", "string", "integer", "number"))}

    def string(self, depth: int) -> Schema:
        schema: Schema = {"type": "string"}
        match self.rng.randrange(4):
            case 0:
                schema["pattern"] = self.rng.choice(PATTERNS)
            case 1:
                schema["format"] = self.rng.choice(FORMATS)
            case 2:
                schema |= self.bounds("minLength", "maxLength", 12)
            case 3:
                schema |= {"pattern": self.rng.choice(PATTERNS), "maxLength": self.rng.randrange(6, 12)}
        return schema

    def bounds(self, low_name: str, high_name: str, high: int) -> Schema:
        low = self.rng.randrange(high // 2)
        both = {low_name: low, high_name: self.rng.randrange(low, high)}
        return {name: value for name, value in both.items() if self.maybe(0.7)}

    def integer(self, depth: int) -> Schema:
        schema: Schema = {"type": "integer"}
        limit = self.rng.choice((10, 1000, 10**9, 2**40))
        low = self.rng.randrange(-limit, limit)
        if self.maybe():
            schema[self.rng.choice(("minimum", "exclusiveMinimum"))] = low
        if self.maybe():
            schema[self.rng.choice(("maximum", "exclusiveMaximum"))] = low + self.rng.randrange(2, limit)
        if self.maybe(0.2):
            schema["multipleOf"] = self.rng.choice((2, 3, 5, 10, 7, 256))
        return schema

    def number(self, depth: int) -> Schema:
        schema: Schema = {"type": "number"}
        low = round(self.rng.uniform(-100, 100), self.rng.randrange(4))
        if self.maybe():
            schema[self.rng.choice(("minimum", "exclusiveMinimum"))] = low
        if self.maybe():
            high = round(low + self.rng.uniform(0.5, 1000), self.rng.randrange(3))
            schema[self.rng.choice(("maximum", "exclusiveMaximum"))] = max(high, low + 1)
        if self.maybe(0.2):
            schema["multipleOf"] = self.rng.choice((0.5, 0.25, 0.1, 0.01, 2, 3))
        return schema

    def value(self, depth: int) -> Any:
        """Return a JSON value."""
        match self.rng.randrange(8 if depth > 0 else 6):
            case 0:
                return self.rng.choice((None, True, False))
            case 1:
                return self.rng.randrange(-1000, 1000)
            case 2:
                return self.rng.choice((0.5, -2.25, 1.0, 1e10, -0.001))
            case 6:
                return [self.value(depth - 1) for _ in range(self.rng.randrange(3))]
            case 7:
                return {name: self.value(depth - 1) for name in self.rng.sample(NAMES, 2)}
        return "".join(self.rng.choices(string.ascii_letters + ' "\\/\n\tüñ漢😀', k=self.rng.randrange(8)))

    def literal(self, depth: int) -> Schema:
        if self.maybe():
            return {"const": self.value(2)}
        return {"enum": [self.value(1) for _ in range(self.rng.randrange(1, 5))]}

    def object(self, depth: int) -> Schema:
        schema: Schema = {"type": "object"}
        names = self.rng.sample(NAMES, self.rng.randrange(5))
        if names or self.maybe():
            schema["properties"] = {name: self.any(depth - 1) for name in names}
        if self.maybe(0.7):
            schema["required"] = self.rng.sample(NAMES[:4] if self.maybe(0.1) else names, min(len(names), 2))
        match self.rng.randrange(4):
            case 0:
                schema["additionalProperties"] = self.any(depth - 1)
            case 1 | 2:
                schema["additionalProperties"] = False
        if self.maybe(0.2):
            keys = self.rng.sample(KEY_PATTERNS, self.rng.randrange(1, 3))
            schema["patternProperties"] = {pattern: self.any(depth - 1) for pattern in keys}
        if self.maybe(0.1):
            schema |= self.bounds("minProperties", "maxProperties", 4)
        return schema

    def array(self, depth: int) -> Schema:
        schema: Schema = {"type": "array"}
        if self.maybe(0.3):
            schema["prefixItems"] = [self.any(depth - 1) for _ in range(self.rng.randrange(1, 4))]
        if self.maybe(0.8):
            schema["items"] = self.any(depth - 1) if self.maybe(0.9) else False
        return schema | self.bounds("minItems", "maxItems", 5)

    def choice(self, depth: int) -> Schema:
        if self.maybe(0.3):  # alternatives told apart by a name
            kinds = self.rng.sample(("cat", "dog", "bird"), 2)
            return {"oneOf": [self.tagged(kind, depth - 1) for kind in kinds]}
        return {self.rng.choice(("anyOf", "anyOf", "oneOf")): [self.any(depth - 1) for _ in range(2)]}

    def tagged(self, kind: str, depth: int) -> Schema:
        schema = self.object(depth)
        schema["properties"] = {"kind": {"const": kind}} | schema.get("properties", {})
        schema["properties"]["kind"] = {"const": kind}
        schema["required"] = ["kind"]
        return schema

    def nullable(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth - 1), {"type": "null"}]}

    def conjunction(self, depth: int) -> Schema:
        """Return an intersection, which is often of the same types so that something is left."""
        kind = self.rng.choice((self.string, self.integer, self.number, self.object, self.array))
        return {"allOf": [kind(depth - 1), kind(depth - 1)]}

    def reference(self, depth: int) -> Schema:
        return {"$ref": "#/$defs/" + self.rng.choice(self.names)}


def random_schema(seed: int) -> Schema:
    """Return a schema of the draft 2020-12."""
    return _Schemas(random.Random(seed)).draw()


def random_regex(seed: int) -> str:
    """Return a regular expression that Python and Rust understand alike, to be matched by whole texts."""
    rng = random.Random(seed)
    return _regex(rng, 3)


def _regex(rng: random.Random, depth: int) -> str:
    atoms = (
        "a",
        "xy",
        "[a-f]",
        "[^a-z\\n]",
        "[0-9]",
        "[A-Z0-9_]",
        r"\.",
        "é",
        "[0-9]{2}",
        " ",
        r"\(",
        "漢",
        "[^0-9 ]",
        "\\\\",
        '"',
    )
    if depth == 0:
        return rng.choice(atoms)
    match rng.randrange(5):
        case 0:
            return rng.choice(atoms)
        case 1:
            return "".join(_regex(rng, depth - 1) for _ in range(rng.randrange(2, 4)))
        case 2:
            return f"({'|'.join(_regex(rng, depth - 1) for _ in range(rng.randrange(2, 4)))})"
        case 3:
            low = rng.randrange(3)
            bound = rng.choice(("*", "+", "?", f"{{{low}}}", f"{{{low},}}", f"{{{low},{low + rng.randrange(4)}}}"))
            return f"(?:{_regex(rng, depth - 1)}){bound}"
    return f"{_regex(rng, depth - 1)}(?:{_regex(rng, depth - 1)})?"
