"""The bodies of agents' routes against vLLM's classes, whose fields are in data/vllm_agent_request_fields.json."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from eagleray.server.anthropic.request import COUNT_FATES, MESSAGES_FATES, CountTokensRequest, MessagesRequest
from eagleray.server.openai.responses_api.request import RESPONSES_FATES, ResponsesRequest

FACTS = json.loads((Path(__file__).parent / "data/vllm_agent_request_fields.json").read_text())
USER = {"role": "user", "content": "hello"}
ROUTES = {
    "/v1/responses": (FACTS["ResponsesRequest"], ResponsesRequest, RESPONSES_FATES, {"input": "hello"}),
    "/v1/messages": (
        FACTS["AnthropicMessagesRequest"],
        MessagesRequest,
        MESSAGES_FATES,
        {"messages": [USER], "max_tokens": 5},
    ),
    "/v1/messages/count_tokens": (
        FACTS["AnthropicCountTokensRequest"],
        CountTokensRequest,
        COUNT_FATES,
        {"messages": [USER]},
    ),
}


@pytest.mark.parametrize("path", ROUTES)
def test_agent_field_fates_every_field_of_vllm_has_one(path):
    facts, body, fates, _ = ROUTES[path]
    effective = {field.name for field in msgspec.structs.fields(body)}
    assert FACTS["vllm"] == "0.32.0"
    assert len(facts) > 7
    assert not facts.keys() - effective - fates.keys()
    assert not effective & fates.keys()


@pytest.mark.parametrize("path", ROUTES)
def test_agent_field_fates_defaults_of_vllm_are_accepted_together(api, path):
    facts, _, _, minimal = ROUTES[path]
    defaults = {name: fact["default"] for name, fact in facts.items() if "default" in fact and name != "store"}
    response = api.post(path, defaults | minimal)
    assert response.status_code == 200, response.text
    assert "x-eagleray-ignored" not in response.headers


@pytest.mark.parametrize("path", ROUTES)
def test_agent_field_fates_every_refusal_names_its_field(api, path):
    _, _, fates, minimal = ROUTES[path]
    names = [name for name, fate in fates.items() if fate.kind == "refuse" and "." not in name]
    assert names
    for name in names:
        response = api.post(path, minimal | {name: "unlike any other value"})
        assert response.status_code == 400
        assert f"(`{name}`)" in response.json()["error"]["message"]
    assert not api.engine.requests


@pytest.mark.parametrize("path", ROUTES)
def test_agent_field_fates_every_off_value_is_accepted(api, path):
    _, _, fates, minimal = ROUTES[path]
    for name, fate in fates.items():
        for value in (None, *fate.off) if "." not in name else ():
            response = api.post(path, minimal | {name: value})
            assert response.status_code == 200, (name, value, response.text)
            assert "x-eagleray-ignored" not in response.headers
