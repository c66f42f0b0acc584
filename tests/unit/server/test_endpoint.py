"""Rules of every route: request ids, API keys, sizes, methods."""

from __future__ import annotations

import subprocess
import sys

import pytest
from server_fakes import serving

from eagleray import errors
from eagleray.server import error_responses
from eagleray.server.error_responses import TABLE, ErrorRule, error_response

OPEN = ["/health", "/live", "/ready", "/ping", "/version", "/metrics"]
CLOSED = ["/v1/models", "/load", "/server_info", "/openapi.json", "/v1/completions", "/tokenize", "/no/such/route"]


def test_endpoint_every_response_has_a_request_id(api):
    for path in [*OPEN, *CLOSED]:
        assert len(api.get(path).headers["x-request-id"]) == 32
        assert api.get(path, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert api.get("/live").headers["x-request-id"] != api.get("/live").headers["x-request-id"]
    body = {"prompt": "hello", "stream": True}
    assert api.post("/v1/completions", body, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"


@pytest.mark.parametrize("request_id", ["", "two words", "x" * 129])
def test_request_id_with_other_characters_is_refused(api, request_id):
    response = api.get("/live", headers={"X-Request-Id": request_id})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Id"
    assert len(response.headers["x-request-id"]) == 32


def test_api_key_opens_closed_endpoints(checkpoint):
    with serving(checkpoint, api_key=["one", "twö"]) as api:
        for path in OPEN:
            assert api.get(path).status_code == 200
        for path in CLOSED:
            for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic one"}, {"Authorization": "one"}):
                response = api.get(path, headers=wrong)
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
        for right in ("Bearer one", "bearer one", "Bearer twö"):
            assert api.get("/v1/models", headers={"Authorization": right.encode()}).status_code == 200
        assert not api.engine.requests


def test_server_without_api_keys_is_open(api):
    assert api.get("/v1/models", headers={"Authorization": "Bearer whatever"}).status_code == 200


def test_endpoint_unknown_or_wrong_method_is_refused(api):
    response = api.get("/v2/completions")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"
    response = api.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert api.request("HEAD", "/live").status_code == 200
    assert api.post("/ping").status_code == 200


def test_generating_routes_unknown_model_is_refused(api):
    for path, body in [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [5]}),
    ]:
        response = api.post(path, body | {"model": "gpt"})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "gpt" in error["message"]
        assert "tiny" in error["message"]
        assert api.post(path, body | {"model": "alias"}).status_code == 200


@pytest.fixture
def narrow(checkpoint):
    with serving(checkpoint, max_request_bytes=100) as api:
        yield api


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize"])
def test_body_announced_too_large_is_not_read(narrow, path):
    response = narrow.request("POST", path, content=b"x" * 101)
    assert response.status_code == 413
    assert "100" in response.json()["error"]["message"]


def test_body_that_grows_too_large_is_not_read_to_its_end(narrow):
    sent = []

    async def body():
        for _ in range(1000):
            sent.append(1)
            yield b"x" * 30

    response = narrow.request("POST", "/v1/completions", content=body())
    assert "content-length" not in response.request.headers
    assert response.status_code == 413
    assert len(sent) <= 5
    assert response.json()["error"]["code"] == "request_too_large"


def test_body_at_the_limit_is_read(narrow):
    body = b'{"prompt": "hello"}'
    assert narrow.request("POST", "/tokenize", content=body + b" " * (100 - len(body))).status_code == 200


def test_body_nested_too_deeply_is_refused(api):
    content = b'{"chat_template_kwargs": {"x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}}"
    response = api.request("POST", "/v1/chat/completions", content=content)
    assert response.status_code == 400
    assert "nested" in response.json()["error"]["message"]


def test_endpoint_every_exception_has_a_response():
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EagleRayError)
    ]
    assert len(kinds) > 15
    for kind in kinds:
        refusal = error_response(kind("because"), "mine")
        assert 400 <= refusal.status < 600
        if issubclass(kind, errors.UserError):
            assert refusal.status < 500
            assert refusal.reply.error.message == "because"
    rules = [*TABLE.values(), *(value for value in vars(error_responses).values() if isinstance(value, ErrorRule))]
    assert {rule.status for rule in rules} == {400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431, 500, 503, 504}


def test_application_imports_no_heavy_package():
    script = (
        "import sys, eagleray.server.app\n"
        "print([name for name in ('torch', 'transformers', 'ray', 'scipy', 'opentelemetry') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
