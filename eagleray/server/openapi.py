"""/openapi.json, made from the table of endpoints and the structs that check the requests, so that it cannot drift.

Pure; `app` asks for the document once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.error_responses import ErrorResponse
from eagleray.server.field_fates import Fate
from eagleray.server.http_responses import MSGPACK

REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "No API key, or an unknown one.",
    403: "Without an API key, the route serves only clients of its own host.",
    404: "The model is not served here, or a directory, adapter or operation that is named does not exist.",
    409: "The state of the instance forbids the call; the message says which call ends it.",
    413: "The request's body is too large.",
    415: "The request's body is compressed in another way than by gzip.",
    429: "Too many requests are in flight; try again after the seconds of the header Retry-After.",
    500: "The request failed.",
    503: "Not at present; try again after the seconds of the header Retry-After.",
    504: "It was not done within its timeout.",
}


def describe(
    endpoints: list[Endpoint], *, version: str, needs_key: bool, control_needs_key: bool, root_path: str = ""
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these endpoints. `control_needs_key`: whether control routes need a key.
    `root_path`: path under which a proxy shows the server, or empty."""
    operations = [operation for endpoint in endpoints for operation in endpoint.operations.values()]
    types = [
        part
        for endpoint in endpoints
        for method, operation in endpoint.operations.items()
        for part in (_body_type(method, operation), operation.response, operation.stream_event)
    ]
    types += [_error_body(endpoint) for endpoint in endpoints]
    types = [*dict.fromkeys(kind for kind in types if kind is not None)]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for operation in operations:
        if operation.request_body is not None and operation.fates is not None:
            _add_fates(operation.request_body, operation.fates, components)
    schema_of = dict(zip(types, schemas, strict=True))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "eagleray", "version": version},
        "paths": {
            endpoint.path: _path_item(endpoint, schema_of, control_needs_key if endpoint.is_control else needs_key)
            for endpoint in endpoints
        },
        "components": {"schemas": components},
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    if needs_key or control_needs_key:
        document["components"]["securitySchemes"] = {
            "api_key": {"type": "http", "scheme": "bearer"},
            "api_key_header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
    return document


def _add_fates(body: type[Any], fates: Mapping[str, Fate], components: dict[str, Any]) -> None:
    """Describe the fields without an effect, and that other fields are taken too, in a body and the structs in it."""
    names = [name for name in msgspec.json.schema_components([body])[1] if name in components]
    for name in names:
        components[name].pop("additionalProperties", None)
    properties = components[body.__name__]["properties"]
    for name, fate in fates.items():
        if "." not in name:
            properties.setdefault(name, _fate_schema(fate))


def _fate_schema(fate: Fate) -> dict[str, Any]:
    if fate.kind != "refuse":
        return {"description": "No effect on the answer."}
    return {"description": f"Not supported: {fate.feature.name}.", "enum": [None, *fate.off]}


def _error_body(endpoint: Endpoint) -> type[msgspec.Struct]:
    return ErrorResponse if endpoint.error_form is None else endpoint.error_form.body


def _path_item(endpoint: Endpoint, schema_of: dict[Any, Any], needs_key: bool) -> dict[str, Any]:
    item: dict[str, Any] = {}
    error_schema = schema_of[_error_body(endpoint)]
    statuses = endpoint.error_form.statuses if endpoint.error_form else {}
    for method, operation in endpoint.operations.items():
        item[method.lower()] = described = _operation(method, operation, schema_of, error_schema)
        reads_body = {415} if 413 in operation.error_statuses else set()
        for status in sorted({*operation.error_statuses, *reads_body}):
            described["responses"][str(statuses.get(status, status))] = _response(REASONS[status], error_schema)
        described["operationId"] = f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', endpoint.path.lower()).strip('_')}"
        if endpoint.is_control:
            described["responses"]["403"] = _response(REASONS[403], error_schema)
        if needs_key and not endpoint.is_open:
            described["security"] = [{"api_key": []}, {"api_key_header": []}]
            described["responses"]["401"] = _response(REASONS[401], error_schema)
    if names := re.findall(r"\{(\w+)", endpoint.path):
        item["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return item


def _body_type(method: str, operation: Operation) -> type | None:
    """Return the type of the body, or None if none is read: that of a GET is ignored."""
    return None if method == "GET" else operation.request_body


def _operation(method: str, operation: Operation, schema_of: dict[Any, Any], error_schema: Any) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success."}
    if operation.response is not None:
        success["content"] = {"application/json": {"schema": schema_of[operation.response]}}
    if operation.gives_msgpack:
        success["content"][MSGPACK] = {"schema": schema_of[operation.response]}
    if operation.stream_event is not None:
        event = _event_schema(schema_of[operation.stream_event], error_schema, is_named=operation.has_named_events)
        success["content"]["text/event-stream"] = {"schema": event}
    described: dict[str, Any] = {"summary": operation.summary, "responses": {"200": success}}
    if operation.may_be_accepted:
        described["responses"]["202"] = {**success, "description": "The operation goes on; ask for its status."}
    if (body_type := _body_type(method, operation)) is not None:
        schema = schema_of[body_type]
        if operation.body_rules is not None:
            schema = {"allOf": [schema, operation.body_rules]}
        body = {"application/json": {"schema": schema}}
        described["requestBody"] = {"required": not operation.takes_query, "content": body}
    parameters = [{"name": name, "in": "header", "schema": schema} for name, schema in operation.headers.items()]
    if operation.takes_query and operation.request_body is not None:
        parameters += _query_parameters(operation.request_body)
    if parameters:
        described["parameters"] = parameters
    return described


def _event_schema(data: Any, error: Any, *, is_named: bool) -> dict[str, Any]:
    """Describe one event of a stream, whose `data` is JSON in a text; see `EventStream` for `is_named`."""
    json_text = {"type": "string", "contentMediaType": "application/json"}
    if is_named:
        properties = {"event": {"type": "string"}, "data": {**json_text, "contentSchema": data}}
    else:
        content = {**json_text, "contentSchema": {"anyOf": [data, error]}}
        properties = {"data": {"anyOf": [{"const": "[DONE]"}, content]}}
    return {"type": "object", "required": [*properties], "properties": properties}


def _query_parameters(kind: type) -> list[dict[str, Any]]:
    """Describe the fields of a struct as query parameters. Objects are left out: only a body can have them."""
    properties = msgspec.json.schema_components([kind])[1][kind.__name__]["properties"]
    return [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in properties.items()
        if "object" not in {part.get("type") for part in (schema, *schema.get("anyOf", []))}
    ]


def _response(text: str, schema: Any) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
