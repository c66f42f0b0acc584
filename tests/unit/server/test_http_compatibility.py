"""HTTP of browsers, proxies and other clients: other origins, root path, last slashes, gzip, HTTP/1.0, keys."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import pytest
from http_fakes import HttpServer, request
from server_fakes import Call, serving, settle

from eagleray.server.paths import normalized, route_path

PAGE = "https://page.example"
BODY = {"prompt": "hello", "max_tokens": 2}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}
ALLOWED = "access-control-allow-origin"


@pytest.fixture
def shared(checkpoint):
    """A server with a key that shows its answers to one page."""
    with serving(checkpoint, allowed_origins=[PAGE + "/"], api_key=["key"], max_request_bytes=2000) as api:
        yield api


def test_preflight_of_an_allowed_page_needs_no_key(shared):
    answer = shared.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers[ALLOWED] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("options", "changed", "reason"),
    [
        ({}, {}, "`--allowed-origins`"),
        ({"allowed_origins": ["https://other.example"]}, {}, "`--allowed-origins`"),
        ({"allowed_origins": ["*"], "allowed_methods": '["GET"]'}, {}, "`--allowed-methods`"),
        ({"allowed_origins": ["*"], "allowed_headers": ["X-A"]}, {}, "may not send the header authorization"),
        ({"allowed_origins": [PAGE]}, {"Access-Control-Request-Method": "TRACE"}, "the method TRACE"),
    ],
)
def test_preflight_of_a_page_that_is_not_allowed_is_refused(checkpoint, options, changed, reason):
    with serving(checkpoint, **options) as api:
        answer = api.request("OPTIONS", "/v1/completions", headers=PREFLIGHT | changed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "origin_not_allowed")
    assert reason in answer.json()["error"]["message"]
    assert answer.headers.get(ALLOWED) in (None, "*", PAGE)
    assert (ALLOWED in answer.headers) == (reason != "`--allowed-origins`")


def test_options_request_that_is_no_preflight_is_no_method(shared):
    assert shared.request("OPTIONS", "/live").status_code == 405


def test_answers_and_refusals_are_shown_to_allowed_pages(shared):
    key, page = {"Authorization": "Bearer key"}, {"Origin": PAGE}
    shared.join(max_model_len=64)
    answers = {
        200: shared.post("/v1/completions", BODY, headers=key | page),
        400: shared.post("/v1/completions", {"prompt": 3.5}, headers=key | page),
        401: shared.post("/v1/completions", BODY, headers=page),
        404: shared.get("/nowhere", headers=key | page),
        405: shared.get("/v1/completions", headers=key | page),
        413: shared.request("POST", "/v1/completions", content=b"x" * 2001, headers=key | page),
        415: shared.request("POST", "/tokenize", content=b"x", headers=key | page | {"Content-Encoding": "br"}),
    }
    for status, answer in answers.items():
        assert (answer.status_code, answer.headers.get(ALLOWED)) == (status, PAGE)
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    stream = shared.post("/v1/completions", BODY | {"stream": True}, headers=key | page)
    assert stream.headers[ALLOWED] == PAGE
    other = shared.post("/v1/completions", BODY, headers=key | {"Origin": "https://other.example"})
    assert (other.status_code, other.headers.get(ALLOWED), other.headers["vary"]) == (200, None, "Origin")


def test_overload_is_shown_to_allowed_pages(checkpoint):
    with serving(checkpoint, allowed_origins=["*"], max_queued_requests=1) as api:
        api.engine.script = None

        async def wait():
            waiting = Call(api.app, "/v1/completions", BODY)
            await settle()
            return waiting

        async def leave(waiting):
            waiting.leave()
            await waiting.task

        waiting = api.run(wait())
        answer = api.post("/v1/completions", BODY, headers={"Origin": PAGE})
        api.run(leave(waiting))
        assert (answer.status_code, answer.headers[ALLOWED]) == (429, "*")
        assert "vary" not in answer.headers


def test_credentials_name_the_page_in_place_of_all(checkpoint):
    with serving(checkpoint, allowed_origins="*", allow_credentials=True) as api:
        answer = api.get("/live", headers={"Origin": PAGE})
    assert answer.headers[ALLOWED] == PAGE
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers["vary"] == "Origin"


def test_server_without_origins_shows_nothing(api):
    answer = api.get("/live", headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert not {name for name in answer.headers if name.startswith("access-control")}


def test_refusal_of_the_protocol_is_shown_to_allowed_pages():
    with asyncio.Runner() as runner:
        connection = HttpServer(runner, allowed_origins=[PAGE], max_header_count=8).connect()
        connection.send(request("/a", f"Origin: {PAGE}", *[f"X-{number}: y" for number in range(9)]))
        answer = connection.answer()
        assert (answer.status, answer.headers[ALLOWED]) == (431, PAGE)


def test_root_path_may_be_in_the_path_or_not(checkpoint):
    with serving(checkpoint, root_path="/llm/", api_key=["key"]) as api:
        key = {"Authorization": "Bearer key"}
        for prefix in ("", "/llm"):
            assert api.get(prefix + "/live").status_code == 200
            assert api.get(prefix + "/v1/models").status_code == 401
            assert api.get(prefix + "/v1/models/", headers=key).status_code == 200
        assert api.get("/llmlive", headers=key).status_code == 404
        assert api.get("/openapi.json", headers=key).json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize(
    ("path", "root_path", "route"),
    [
        ("/", "", "/"),
        ("/a", "", "/a"),
        ("/a/", "", "/a"),
        ("/a//", "", "/a"),
        ("//", "", "/"),
        ("/llm", "/llm", "/"),
        ("/llm/", "/llm", "/"),
        ("/llm/a/", "/llm", "/a"),
        ("/llma/", "/llm", "/llma"),
        ("/", "/llm", "/"),
    ],
)
def test_route_path_is_without_root_path_and_last_slash(path, root_path, route):
    assert route_path(path, root_path) == route
    assert route_path(normalized(path, root_path), root_path) == route


def test_openapi_without_root_path_names_no_server(api):
    assert "servers" not in api.get("/openapi.json").json()


def test_connection_of_the_reserve_shows_the_state_below_the_root_path():
    with asyncio.Runner() as runner:
        server = HttpServer(runner, max_connections=1, root_path="/llm")
        server.connect().send(request("/stream"))
        reserved = server.connect()
        assert not reserved.is_within_limit
        reserved.send(request("/llm/live/"))
        assert reserved.answer().status == 200


def test_last_slash_is_the_same_route(checkpoint):
    with serving(checkpoint, api_key=["key"]) as api:
        key = {"Authorization": "Bearer key"}
        assert api.post("/v1/completions/", BODY, headers=key).status_code == 200
        assert api.get("/v1/models/tiny/", headers=key).json()["id"] == "tiny"
        assert api.post("/v1/completions/", BODY).status_code == 401
        assert api.get("/live/").status_code == 200
        assert api.post("/pause/", headers=key | {"X-Forwarded-For": "10.0.0.1"}).status_code != 404


def test_control_route_with_a_last_slash_is_protected(api):
    assert api.post("/pause/", headers={"X-Forwarded-For": "10.0.0.1"}).status_code == 403


def test_x_api_key_is_a_key(checkpoint):
    with serving(checkpoint, api_key=["key"], admin_api_key=["admin"]) as api:
        assert api.get("/v1/models", headers={"X-API-Key": "key"}).status_code == 200
        assert api.get("/v1/models", headers={"X-API-Key": "wrong"}).status_code == 401
        assert api.get("/v1/models", headers={"X-API-Key": "key", "Authorization": "Bearer other"}).status_code == 200
        assert api.post("/pause", headers={"X-API-Key": "key"}).status_code == 401


def test_empty_api_key_header_is_no_key(checkpoint):
    with serving(checkpoint, api_key=["key"]) as api:
        for headers in ({"X-API-Key": ""}, {"Authorization": "Bearer "}, {"Authorization": "key"}):
            assert api.get("/v1/models", headers=headers).status_code == 401


def post_gzip(api, data, encoding="gzip", path="/v1/completions"):
    return api.request("POST", path, content=data, headers={"Content-Encoding": encoding})


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP"])
def test_gzip_body_is_inflated(api, encoding):
    answer = post_gzip(api, gzip.compress(json.dumps(BODY).encode()), encoding)
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_gzip_body_of_several_members_is_joined(api):
    text = json.dumps(BODY).encode()
    assert post_gzip(api, gzip.compress(text[:9]) + gzip.compress(text[9:])).status_code == 200


def test_gzip_body_of_control_call_is_inflated(api):
    answer = post_gzip(api, gzip.compress(b'{"timeout": "never"}'), path="/pause")
    assert answer.json()["error"]["param"] == "timeout"


@pytest.fixture
def small(checkpoint):
    with serving(checkpoint, max_request_bytes=200_000) as api:
        yield api


def test_gzip_body_larger_than_the_limit_is_refused(small):
    bomb = gzip.compress(b" " * 100_000_000, 6)
    assert len(bomb) < 200_000
    answer = post_gzip(small, bomb)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_gzip_body_of_many_members_is_refused(small):
    answer = post_gzip(small, gzip.compress(b"") * 2000)
    assert answer.status_code == 400
    assert "more than 1024 members" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{}", "is not gzip"),
        (gzip.compress(b'{"prompt": "hello"}', mtime=0)[:-3], "ends too early"),
        (gzip.compress(b'{"prompt": "hello"}', mtime=0)[:-8] + b"\0" * 8, "is not gzip"),
        (gzip.compress(b'{"prompt": "hello"}', mtime=0) + b"garbage", "is not gzip"),
        (zlib.compress(b"{}"), "is not gzip"),
    ],
)
def test_gzip_body_that_is_broken_is_refused(api, data, reason):
    answer = post_gzip(api, data)
    assert (answer.status_code, reason in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip", "é" * 200])
def test_body_of_another_encoding_is_refused(api, encoding):
    answer = post_gzip(api, b"{}", encoding.encode("latin-1"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert answer.headers["accept-encoding"] == "gzip"


def test_body_with_the_identity_encoding_is_read(api):
    assert post_gzip(api, json.dumps(BODY).encode(), "identity").status_code == 200


def old(path, *headers):
    return request(path, *headers).replace(b"HTTP/1.1", b"HTTP/1.0")


def test_http_1_0_stream_has_no_chunks_and_ends_with_the_connection():
    with asyncio.Runner() as runner:
        server = HttpServer(runner)
        connection = server.connect()
        connection.send(old("/stream", "Connection: keep-alive"))
        server.app.go_on.set()
        server.settle()
        head, _, body = connection.transport.written.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"chunked" not in head
        assert b"content-length" not in head
        assert body == b"first last"
        assert connection.transport.is_closed


def test_http_1_0_answer_with_a_length_keeps_it():
    with asyncio.Runner() as runner:
        connection = HttpServer(runner).connect()
        connection.send(old("/a"))
        assert connection.transport.written.endswith(b"\r\n\r\nGET /a ")
        assert b"content-length: 7\r\n" in connection.transport.written
        assert not connection.is_open


def test_http_1_0_head_of_a_stream_has_no_body():
    with asyncio.Runner() as runner:
        server = HttpServer(runner)
        connection = server.connect()
        connection.send(old("/stream").replace(b"GET", b"HEAD"))
        server.app.go_on.set()
        server.settle()
        head, _, body = connection.transport.written.partition(b"\r\n\r\n")
        assert (b"chunked" in head, body, connection.is_open) == (False, b"", False)
