"""Reference of the HTTP routes, made from the document that a server shows at /openapi.json."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from docs_site.markdown import code, plain, table
from eagleray.client.client import Client
from eagleray.config.build import build_config
from eagleray.config.sections import Config
from eagleray.identity import ClientId
from eagleray.metrics.ledger import Ledger
from eagleray.server.app import list_endpoints
from eagleray.server.openapi import REASONS, describe
from eagleray.server.service import Service

HEAD = """# HTTP routes

A server shows this description of itself as OpenAPI 3.1 at `/openapi.json`.
[compatibility.md](../docs/compatibility.md) says how bodies of programs for other servers are read,
[limits.md](../docs/limits.md) how large they may be.

"""

GROUPS = ("Routes", "Control routes", "Routes of SGLang")
INTRODUCTIONS = (
    "",
    "Who may call these is in [rl.md](../docs/rl.md#control-calls).\n\n",
    "Only with `--enable-sglang-api`; see [rl.md](../docs/rl.md#trainers-for-other-engines).\n\n",
)
CONTROL_STATUS = "403"
"""Status that only control routes have."""
IGNORED = "No effect on the answer."
REFUSED = "Not supported: "

Schema = Mapping[str, Any]


class Unconnected:
    """Both ends of the connection of a client that sends nothing and receives nothing."""

    address = ""

    def send(self, peer: object, message: object) -> None: ...


def page() -> str:
    document, with_sglang = read_document(), read_document(enable_sglang_api=True)
    paths = with_sglang["paths"] | document["paths"]
    schemas = with_sglang["components"]["schemas"] | document["components"]["schemas"]
    grouped: dict[str, str] = dict.fromkeys(GROUPS, "")
    for path, method, operation in _operations(paths):
        group = 2 if path not in document["paths"] else 1 if CONTROL_STATUS in operation["responses"] else 0
        grouped[GROUPS[group]] += _operation(f"{method.upper()} {path}", operation)
    errors = table(("status", "meaning"), ((status, plain(reason)) for status, reason in _errors(paths).items()))
    routes = "".join(f"## {name}\n\n{text}{grouped[name]}" for name, text in zip(GROUPS, INTRODUCTIONS, strict=True))
    bodies = "".join(_schema(name, schema) for name, schema in schemas.items())
    return f"{HEAD}## Errors\n\n{errors}{routes}## Bodies\n\n{bodies}"


def read_document(**options: Any) -> dict[str, Any]:
    """Return the OpenAPI document of a server of the embedded model with these options."""
    with open_service(**options) as (service, config):
        endpoints = list_endpoints(service, config)
        return describe(endpoints, version=service.version, needs_key=False, control_needs_key=False)


@contextmanager
def open_service(**options: Any) -> Iterator[tuple[Service, Config]]:
    """Yield the service that the routes of a server of the embedded model share, without engines, and its options."""
    config = build_config(enable_tokenizer_info_endpoint=True, **options)
    nowhere: Any = Unconnected()
    with tempfile.TemporaryDirectory() as directory, closing(Ledger.open(Path(directory), 0)) as ledger:
        yield Service(Client.create(ClientId("", 0), config, inbox=nowhere, outbox=nowhere), config, ledger), config


def _errors(paths: Schema) -> dict[str, str]:
    """Return the meaning of every HTTP status of an error that some route responds with."""
    reasons = {str(status): reason for status, reason in REASONS.items()}
    for _, _, operation in _operations(paths):
        _, *errors = sorted(operation["responses"].items())
        reasons |= {status: response["description"] for status, response in errors if status not in reasons}
    return dict(sorted(reasons.items()))


def _operations(paths: Schema) -> Iterator[tuple[str, str, Schema]]:
    """Yield the path, the method and the description of every operation."""
    for path, item in paths.items():
        yield from ((path, method, operation) for method, operation in item.items() if method != "parameters")


def _operation(title: str, operation: Schema) -> str:
    text = f"### {title}\n\n{plain(operation['summary'])}\n\n"
    if parameters := operation.get("parameters"):
        rows = ((code(p["name"]), p["in"], _type(p["schema"]), _meaning(p["schema"])) for p in parameters)
        text += table(("parameter", "in", "type", "meaning"), rows)
    facts = []
    if body := operation.get("requestBody"):
        facts.append(f"Body: {_contents(body['content'])}.")
    success, *errors = sorted(operation["responses"].items())
    if content := success[1].get("content"):
        facts.append(f"Answer: {_contents(content)}.")
    if errors:
        facts.append(f"Errors: {', '.join(status for status, _ in errors)}.")
    return text + " ".join(facts) + "\n\n"


def _contents(content: Schema) -> str:
    return "; ".join(
        f"{_type(kind['schema'])}{'' if name == 'application/json' else f' as {code(name)}'}"
        for name, kind in content.items()
    )


def _schema(name: str, schema: Schema) -> str:
    text = f"### {name}\n\n"
    if description := schema.get("description"):
        text += f"{plain(description)}\n\n"
    if "properties" not in schema:
        return text + ("" if "anyOf" not in schema else f"{_type(schema)}\n\n")
    required = schema.get("required", [])
    fields = {name: field for name, field in schema["properties"].items() if not _fate(field)}
    text += table(
        ("field", "type", "meaning"),
        ((code(name), _type(field), _meaning(field, name in required)) for name, field in fields.items()),
    )
    for label, fate in (("Accepted without an effect", IGNORED), ("Only values that mean “off”", REFUSED)):
        names = [name for name, field in schema["properties"].items() if _fate(field) == fate]
        if names:
            text += f"{label}: {', '.join(map(code, names))}.\n\n"
    return text


def _fate(field: Schema) -> str | None:
    """Return the beginning of the description of a field that the body's struct does not have; None for others."""
    description = field.get("description", "")
    return next((fate for fate in (IGNORED, REFUSED) if description.startswith(fate)), None)


def _meaning(schema: Schema, is_required: bool = False) -> str:
    parts = ["Required."] if is_required else []
    if description := schema.get("description"):
        parts.append(plain(description))
    if (default := schema.get("default")) not in (None, [], {}):
        parts.append(f"Default: {code(json.dumps(default))}.")
    return " ".join(parts)


def _type(schema: Schema) -> str:
    """Return the type of a JSON schema in words, with links to other bodies."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(part) for part in _without_null(schema[key]))
    if "allOf" in schema:
        return _type(schema["allOf"][0])
    if "enum" in schema:
        return ", ".join(code(json.dumps(value)) for value in schema["enum"])
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if schema.get("type") == "array" and schema.get("items"):
        return f"list of {_type(schema['items'])}"
    if schema.get("type") == "object" and "data" in schema.get("properties", {}):
        return f"events of {_type(schema['properties']['data'])}"
    if content := schema.get("contentSchema"):
        return _type(content)
    return str(schema.get("type", "any"))


def _without_null(parts: Iterable[Schema]) -> list[Schema]:
    return [part for part in parts if part.get("type") != "null"]
