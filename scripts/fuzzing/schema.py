"""Request bodies made from a JSON schema: mostly valid, with hostile values in random places."""

from __future__ import annotations

import random
from typing import Any

from fuzzing.values import HOSTILE, encode

Schema = dict[str, Any]

BOUND_NAMES = {"max_tokens": 40, "max_completion_tokens": 40, "min_tokens": 5, "n": 4, "prompt_logprobs": 3}
"""Largest sane values of fields that make answers long, so that a run has many short cases."""

OFTEN = ("prompt", "messages", "token_ids", "sampling_params", "max_tokens")
SANE_SHARE = 0.25
"""Chance that an optional property is present."""

MOST_HOSTILE = 3


class BodyMaker:
    """Makes request bodies from `document`, a server's /openapi.json."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._components: dict[str, Schema] = document["components"]["schemas"]
        self.operations = {
            path: content["application/json"]["schema"]
            for path, item in document["paths"].items()
            if isinstance(operation := item.get("post"), dict)
            and (content := operation.get("requestBody", {}).get("content"))
        }
        # Only control routes answer 403. They would pause or abort the requests of others.
        self._chosen = sorted(
            path for path in self.operations if "403" not in document["paths"][path]["post"].get("responses", {})
        )

    def make(self, rng: random.Random) -> tuple[str, bytes, str]:
        """Return the path of a route that does not steer the instance, a body, and a description of its hostile
        values."""
        path = rng.choice(self._chosen)
        body = self._sane(self._resolved(self.operations[path]), rng, "")
        said = []
        for _ in range(rng.randrange(0, MOST_HOSTILE + 1)):
            name = rng.choice(sorted(HOSTILE))
            place = self._place(body, self.operations[path], rng)
            said.append(f"{place}: {name}")
            _put(body, place, HOSTILE[name](rng))
        return path, encode(body), ", ".join(said) or "nothing"

    def numbers(self, path: str) -> list[str]:
        """Return the names of the properties of a body that may be numbers."""
        return self._named(path, ("integer", "number"))

    def texts(self, path: str) -> list[str]:
        """Return the names of the properties of a body that may be strings."""
        return self._named(path, ("string",))

    def _named(self, path: str, types: tuple[str, ...]) -> list[str]:
        properties = self._resolved(self.operations[path])["properties"]
        return [name for name, schema in properties.items() if self._types(schema) & set(types)]

    def _types(self, schema: Schema) -> set[str]:
        schema = self._resolved(schema)
        inner = [self._types(kind) for kind in schema.get("anyOf", [])]
        return {str(schema.get("type"))}.union(*inner)

    def _place(self, body: Any, schema: Schema, rng: random.Random) -> str:
        """Return the dotted path of a property: of the schema, of an object in the body, or of neither."""
        schema = self._resolved(schema)
        names = sorted(schema.get("properties", {}))
        if not names or rng.random() < 0.03:
            return rng.choice(("unknown_field", "", "__class__"))
        name = rng.choice(names)
        inner = self._resolved(schema["properties"][name])
        if inner.get("properties") and isinstance(body.get(name), dict) and rng.random() < 0.9:
            return f"{name}.{self._place(body[name], inner, rng)}"
        return name

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema or "allOf" in schema:
            if "allOf" in schema:  # the schema of a struct, and rules about its fields
                schema = schema["allOf"][0]
                continue
            schema = self._components[schema["$ref"].rpartition("/")[2]]
        return schema

    def _sane(self, schema: Schema, rng: random.Random, name: str) -> Any:
        schema = self._resolved(schema)
        if "anyOf" in schema:
            kinds = [kind for kind in schema["anyOf"] if kind.get("type") != "null"]
            return self._sane(rng.choice(kinds), rng, name) if kinds else None
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "object":
                return self._sane_object(schema, rng, name)
            case "array":
                count = min(rng.randrange(1, 4), schema.get("maxItems", 4))
                return [self._sane(schema.get("items", {"type": "integer"}), rng, name) for _ in range(count)]
            case "integer":
                return rng.randrange(schema.get("minimum", 0), 1 + BOUND_NAMES.get(name, schema.get("maximum", 9)))
            case "number":
                return round(rng.uniform(0.1, 1.0), 2) if name != "timeout" else 30
            case "boolean":
                return rng.random() < 0.5
            case "string":
                return rng.choice(("Return the", "x", "Grüße 👋", "def main():"))
        return None

    def _sane_object(self, schema: Schema, rng: random.Random, name: str) -> dict[str, Any]:
        required = schema.get("required", [])
        if "properties" not in schema:
            return {str(rng.randrange(100)): round(rng.uniform(-2, 2), 1)} if "additionalProperties" in schema else {}
        return {
            key: self._sane(inner, rng, key)
            for key, inner in schema["properties"].items()
            if not self._resolved(inner).get("x-unsupported")
            and key != "model"
            and (key in required or rng.random() < (0.9 if key in OFTEN else SANE_SHARE / 3))
        }


def _put(body: Any, place: str, value: Any) -> None:
    *parents, name = place.split(".")
    for parent in parents:
        if not isinstance(body.get(parent), dict):
            return
        body = body[parent]
    body[name] = value
