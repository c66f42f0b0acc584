"""The tables of fields against the request classes of vLLM, whose fields are in data/vllm_request_fields.json."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from eagleray.server.field_fates import CHAT_FATES, COMPLETION_FATES
from eagleray.server.openai.requests import ChatRequest, CompletionRequest

FACTS = json.loads((Path(__file__).parent / "data/vllm_request_fields.json").read_text())
ROUTES = {
    "/v1/chat/completions": (FACTS["ChatCompletionRequest"], ChatRequest, CHAT_FATES),
    "/v1/completions": (FACTS["CompletionRequest"], CompletionRequest, COMPLETION_FATES),
}
MINIMAL = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
}


@pytest.mark.parametrize("path", ROUTES)
def test_field_fates_every_field_of_vllm_has_one(path):
    facts, body, fates = ROUTES[path]
    effective = {field.name for field in msgspec.structs.fields(body)}
    assert FACTS["vllm"] == "0.32.0"
    assert len(facts) > 50
    assert not facts.keys() - effective - fates.keys()
    assert not effective & fates.keys()


@pytest.mark.parametrize("path", ROUTES)
def test_field_fates_defaults_of_vllm_are_accepted_together(api, path):
    facts, _, _ = ROUTES[path]
    body = {name: fact["default"] for name, fact in facts.items() if "default" in fact} | MINIMAL[path]
    response = api.post(path, body)
    assert response.status_code == 200, response.text
    assert "x-eagleray-ignored" not in response.headers


@pytest.mark.parametrize("path", ROUTES)
def test_field_fates_every_off_value_is_accepted_silently(api, path):
    _, _, fates = ROUTES[path]
    tried = 0
    for name, fate in fates.items():
        if "." in name:
            continue
        for value in (None, *fate.off):
            response = api.post(path, MINIMAL[path] | {"max_tokens": 1, name: value})
            assert response.status_code == 200, (name, value, response.text)
            assert "x-eagleray-ignored" not in response.headers
            tried += 1
    assert tried > 90


@pytest.mark.parametrize("path", ROUTES)
def test_field_fates_every_refusal_names_its_field(api, path):
    _, _, fates = ROUTES[path]
    for name in [name for name, fate in fates.items() if fate.kind == "refuse"]:
        response = api.post(path, MINIMAL[path] | {name: "unlike any other value"})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
        assert f"(`{name}`)" in error["message"]
    assert not api.engine.requests
