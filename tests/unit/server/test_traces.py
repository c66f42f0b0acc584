"""Spans of HTTP requests, sent to a collector on this host."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_fakes import pool_ones, serving

from eagleray.config.pooling_spec import PoolingSpec
from eagleray.config.traces import TRACES_PROTOCOL

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = {"traceparent": PARENT, "X-Request-Id": "mine"}


@contextlib.contextmanager
def collector():
    """Yield the URL of a collector, and the list of what it gets."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        finally:
            server.shutdown()
            thread.join()


def test_requests_of_every_kind_have_spans_that_are_sent_at_the_end(checkpoint, monkeypatch):
    monkeypatch.setenv(TRACES_PROTOCOL, "http/protobuf")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-llm")
    with collector() as (url, received):
        with serving(checkpoint, otlp_traces_endpoint=url) as api:
            api.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, headers=HEADERS)
            api.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
            api.post("/v1/completions", {"prompt": "a", "max_tokens": -1}, headers=HEADERS)  # refused: no span
            api.join(pooling=PoolingSpec(kind="embed", method="last", activation="normalize"))
            api.engine.script = pool_ones
            assert api.post("/v1/embeddings", {"input": "a"}, headers=HEADERS).status_code == 200
        resources = [resource for request in received for resource in request.resource_spans]
    assert {(each.key, each.value.string_value) for each in resources[0].resource.attributes} >= {
        ("service.name", "our-llm"),
        ("service.instance.id", "client-0"),
    }
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    first, second, chat, embedding = spans
    for span in (first, second, embedding):
        assert f"{span.trace_id.hex()}-{span.parent_span_id.hex()}" in PARENT
        assert {each.value.string_value for each in span.attributes if each.key == "gen_ai.request.id"} == {"mine"}
    assert chat.parent_span_id == b""
    assert "gen_ai.usage.completion_tokens" in {each.key for each in chat.attributes}
