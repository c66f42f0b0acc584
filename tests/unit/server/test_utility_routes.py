"""The small routes, and the OpenAPI document of all routes."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import stats

from eagleray import __version__
from eagleray.messages.outputs import WorkersReturned
from eagleray.messages.plain import pack


def test_status_routes_answer(api):
    for path in ("/live", "/health", "/ready", "/ping"):
        response = api.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert api.get("/version").json() == {"version": __version__}
    assert api.get("/load").json() == {"server_load": 0}


def test_models_route_lists_every_name(api, checkpoint):
    answer = api.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == ["tiny", "alias"]
    card = api.get("/v1/models/alias").json()
    assert card.pop("created") > 0
    assert card == {
        "id": "alias",
        "object": "model",
        "owned_by": "eagleray",
        "root": str(checkpoint),
        "parent": None,
        "max_model_len": 64,
    }
    response = api.get("/v1/models/some/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_tokenize_text_returns_its_token_ids(api):
    tokens = api.client.tokenizer.encode("hello again", add_special_tokens=True)
    answer = api.post("/tokenize", {"prompt": "hello again"}).json()
    assert answer == {"count": len(tokens), "max_model_len": 64, "tokens": tokens, "token_strs": None}
    texts = api.post("/tokenize", {"prompt": "hello again", "return_token_strs": True}).json()["token_strs"]
    assert "".join(texts) == "helloĠagain"  # as the vocabulary spells them
    assert api.post("/tokenize", {"prompt": ""}).json()["count"] == 0


def test_tokenize_conversation_returns_the_templates_token_ids(api):
    messages = [{"role": "user", "content": "hello"}]
    tokens = api.post("/tokenize", {"messages": messages}).json()["tokens"]
    api.post("/v1/chat/completions", {"messages": messages})
    assert tokens == api.engine.requests[0].prompt_token_ids
    shorter = api.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert shorter == tokens[: len(shorter)] != tokens


def test_detokenize_returns_the_text(api):
    text = "hello <|im_end|> 😀" * 800
    tokens = api.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert len(tokens) > 4096
    assert api.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    assert api.post("/detokenize", {"tokens": tokens[:1]}).json() == {"prompt": "hello"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
    ],
)
def test_tokenize_wrong_field_is_refused_by_name(api, path, body, param):
    response = api.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_metrics_after_requests_count_them(api):
    api.deliver(stats(num_running=3))
    api.post("/v1/completions", {"prompt": "hello", "max_tokens": 3})
    api.events("/v1/completions", {"prompt": "hello", "max_tokens": 3})
    api.get("/v1/models/alias")
    api.get("/no/such/route")
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    values = {
        (sample.name, *sorted(value for key, value in sample.labels.items() if key != "model_name")): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert values["eagleray:num_requests_running", "0"] == 3
    assert values["eagleray:request_success_total", "length"] == 2
    assert values["eagleray:time_to_first_token_seconds_count", "0"] == 2
    assert values["eagleray:inter_token_latency_seconds_count",] == 2
    assert values["eagleray:request_generation_tokens_sum",] == 6
    assert values["eagleray:http_requests_total", "/v1/completions", "200", "POST"] == 2
    assert values["eagleray:http_requests_total", "/v1/models/{model}", "200", "GET"] == 1
    assert values["eagleray:http_requests_total", "404", "GET", "unknown"] == 1


def document(api):
    return api.get("/openapi.json").json()


def references(value):
    if isinstance(value, dict):
        yield from (found for key, part in value.items() if key != "$ref" for found in references(part))
        if "$ref" in value:
            yield value["$ref"]
    elif isinstance(value, list):
        yield from (found for part in value for found in references(part))


CONTROL_PATHS = {
    *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/abort_requests"),
    *("/inference/v1/abort_requests", "/get_world_size", "/liveness", "/collective_rpc"),
    *("/weight_info", "/update_weight_version"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/abort_weight_update", "/weight_checker"),
    "/skyrl/v1/load_lora_adapter",
    *("/scale", "/restart", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *("/load_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}


KEPT_PATHS = {f"/v1/responses/{{response_id}}{end}" for end in ("", "/cancel", "/input_items")}


def test_openapi_lists_every_route(api):
    api.engine.call_workers = lambda call: WorkersReturned(call_id=call.call_id, values=[pack({})])
    paths = document(api)["paths"]
    assert set(paths) == {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        *KEPT_PATHS,
        *("/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/completions/render", "/invocations", "/"),
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/inference/v1/generate",
        "/skyrl/v1/generate",
        *("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        "/tokenize",
        "/detokenize",
        "/health",
        "/live",
        "/ready",
        "/ping",
        "/version",
        "/load",
        "/metrics",
        "/server_info",
        "/dashboard",
        "/dashboard/state",
        "/openapi.json",
        *CONTROL_PATHS,
    }
    for path, item in paths.items():
        for method in item.keys() - {"parameters"}:
            status = api.request(method.upper(), path.replace("{model}", "tiny")).status_code
            if path in KEPT_PATHS:
                assert status == 404, path
                continue
            assert status in (200, 400) or (status == 503 and path in CONTROL_PATHS), path
        names = re.findall(r"{(\w+)}", path)
        assert [parameter["name"] for parameter in item.get("parameters", [])] == names


def test_openapi_references_resolve(api):
    page = document(api)
    assert page["openapi"].startswith("3.1")
    assert page["info"]["version"] == __version__
    found = set(references(page))
    assert found == {f"#/components/schemas/{name}" for name in page["components"]["schemas"]}
    ids = [
        operation["operationId"]
        for item in page["paths"].values()
        for method, operation in item.items()
        if method != "parameters"
    ]
    assert len(ids) == len(set(ids))


def test_openapi_schemas_are_those_of_the_checks(api):
    schema = document(api)["components"]["schemas"]["CompletionRequest"]
    assert "additionalProperties" not in schema
    assert schema["required"] == ["prompt"]
    for field, wrong in [("temperature", "x"), ("echo", 2), ("n", 1.5), ("stop", 3)]:
        assert field in schema["properties"]
        response = api.post("/v1/completions", {"prompt": "hello", field: wrong})
        assert response.json()["error"]["param"] == field
    assert schema["properties"]["use_beam_search"]["enum"] == [None, False]
    assert "tools" not in schema["properties"]
    operation = document(api)["paths"]["/v1/completions"]["post"]
    assert set(operation["responses"]) == {"200", "400", "404", "413", "415", "429", "500", "503", "504"}
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def test_openapi_get_has_parameters_and_no_body(api):
    operation = document(api)["paths"]["/get_world_size"]["get"]
    assert [(one["name"], one["in"]) for one in operation["parameters"]] == [("include_dp", "query")]
    assert "requestBody" not in operation
    assert "400" in operation["responses"]


def event_schema(api, path):
    """Return the schema of one event of a route's stream."""
    return document(api)["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]


def names(schema):
    """Return the names of the schemas that are referred to."""
    return {part["$ref"].rpartition("/")[2] for part in schema["anyOf"]}


def test_openapi_stream_ends_with_done_or_has_json_as_text(api):
    event = event_schema(api, "/v1/chat/completions")
    assert list(event["properties"]) == event["required"] == ["data"]
    end, text = event["properties"]["data"]["anyOf"]
    assert end == {"const": "[DONE]"}
    assert (text["type"], text["contentMediaType"]) == ("string", "application/json")
    assert names(text["contentSchema"]) == {"ChatChunk", "ErrorResponse"}


def test_openapi_stream_of_named_events_has_their_names(api):
    event = event_schema(api, "/v1/messages")
    assert list(event["properties"]) == event["required"] == ["event", "data"]
    assert names(event["properties"]["data"]["contentSchema"]) >= {"MessageStart", "AnthropicErrorEvent"}
