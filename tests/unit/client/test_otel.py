"""Spans of requests, by an exporter in memory and by collectors that are down or slow."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
from client_fakes import FakeEngine, asynchronous, attached
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from eagleray.client import otel
from eagleray.client.otel import RequestTracer
from eagleray.client.preprocess import Prompt
from eagleray.client.tracing import RequestOrigin, make_origin
from eagleray.errors import ConfigError, DeadlineExceeded
from eagleray.messages.adapters import Adapter
from eagleray.messages.outputs import FinishReason
from eagleray.messages.sampling import SamplingParams

PROMPT = Prompt(token_ids=[5, 6, 7])
PARAMS = SamplingParams(max_tokens=4, temperature=0.5, top_p=0.75)
PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1"}
FIRST = {"token_ids": [9], "queue_time": 0.25, "prefill_time": 0.5}
LAST = {"token_ids": [9], "finish_reason": FinishReason.LENGTH}


@pytest.fixture(autouse=True)
def _short_interval(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")


class Spans:
    """A tracer whose spans stay in memory; `read` closes it."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()
        self.tracer = RequestTracer(self._exporter, target="memory", label="client-0", model="tiny")

    async def read(self):
        await self.tracer.close()
        return self._exporter.get_finished_spans()


@asynchronous
async def test_span_of_a_request_has_parent_times_and_counts():
    spans = Spans()
    async with attached(tracer=spans.tracer) as setup:
        origin = RequestOrigin("mine", time.perf_counter() - 2.0, PARENT)
        stream = setup.client.generate(PROMPT, PARAMS, request_id="mine-1", origin=origin)
        await setup.engine.send((0, FIRST))
        await setup.engine.send((0, {**LAST, "queue_time": 7.0}))
        await stream.result()
        (span,) = await spans.read()
    assert (span.name, span.kind, span.status.status_code) == ("llm_request", SpanKind.SERVER, StatusCode.UNSET)
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" in PARENT["traceparent"]
    assert span.context.trace_state.get("vendor") == "1"
    attributes = dict(span.attributes)
    first = attributes.pop("gen_ai.latency.time_to_first_token")
    whole = attributes.pop("gen_ai.latency.e2e")
    decode = attributes.pop("gen_ai.latency.time_in_model_decode")
    assert 2.0 <= first <= whole
    assert whole == pytest.approx((span.end_time - span.start_time) / 1e9, abs=0.1)
    assert first + decode == pytest.approx(whole)
    assert attributes.pop("gen_ai.latency.time_in_model_inference") == pytest.approx(0.5 + decode)
    assert attributes == {
        "gen_ai.request.id": "mine",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.5,
    }


@asynchronous
async def test_span_of_a_request_that_moves_is_one_with_events():
    spans = Spans()
    async with attached(tracer=spans.tracer) as setup:
        stream = setup.client.generate(PROMPT, PARAMS, trace_headers=PARENT)
        await setup.engine.send((0, FIRST))
        await setup.engine.leave("killed by SIGKILL")
        successor = await FakeEngine(setup, incarnation=1).join()
        await successor.leave("it is restarted on purpose", is_planned=True)
        successor = await FakeEngine(setup, incarnation=2).join()
        await successor.send((0, {"token_ids": [9], "queue_time": 7.0, "prefill_time": 7.0}))
        await successor.send((0, LAST))
        await stream.result()
        (span,) = await spans.read()
    assert [(event.name, dict(event.attributes)) for event in span.events] == [
        ("engine_exited", {"engine": "engine-0", "cause": "killed by SIGKILL"}),
        ("resumed", {"engine": "engine-0.1"}),
        ("engine_left", {"engine": "engine-0.1", "cause": "it is restarted on purpose"}),
        ("resumed", {"engine": "engine-0.2"}),
    ]
    assert span.attributes["gen_ai.usage.completion_tokens"] == 3
    assert span.attributes["gen_ai.latency.time_in_queue"] == 0.25
    assert span.attributes["gen_ai.request.id"] == stream.request_id
    assert f"{span.parent.span_id:016x}" in PARENT["traceparent"]


@asynchronous
async def test_spans_of_failed_and_aborted_requests_say_so():
    spans = Spans()
    async with attached(tracer=spans.tracer) as setup:
        adapter = Adapter(name="polite", number=1, path="/a")
        origin = RequestOrigin("a", 0.0, {"traceparent": "00-x"})
        setup.client.generate(PROMPT, PARAMS, adapter=adapter, origin=origin).abort()
        late = setup.client.generate(PROMPT, PARAMS, timeout=0.01)
        with pytest.raises(DeadlineExceeded):
            await late.result()
        aborted, failed = await spans.read()
    assert (aborted.status.status_code, aborted.parent) == (StatusCode.UNSET, None)
    assert aborted.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert aborted.attributes["gen_ai.response.model"] == "polite"
    assert "gen_ai.latency.time_to_first_token" not in aborted.attributes
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description.startswith("the request was given up after 0.01 s")
    assert failed.attributes["error.type"] == "DeadlineExceeded"


class Collector:
    """An exporter whose answers the test chooses. `export` waits until `may_answer` is set."""

    def __init__(self):
        self.answers = []
        self.num_spans = 0
        self.num_unseen_exports = threading.Semaphore(0)
        self.may_answer = threading.Event()
        self.is_shut_down = threading.Event()

    def export(self, spans):
        self.may_answer.wait(5)
        self.num_spans += len(spans)
        self.num_unseen_exports.release()
        answer = self.answers.pop(0) if self.answers else SpanExportResult.SUCCESS
        if isinstance(answer, Exception):
            raise answer
        return answer

    def shutdown(self):
        self.is_shut_down.set()


def end_spans(tracer, count):
    for number in range(count):
        tracer.begin(make_origin(str(number), None), None, None).span.end()


def test_collector_that_is_down_is_logged_once_until_it_is_back(caplog):
    caplog.set_level(logging.INFO, logger="eagleray.client.otel")
    collector = Collector()
    collector.answers = [SpanExportResult.FAILURE, ConnectionError("refused"), SpanExportResult.FAILURE]
    collector.may_answer.set()
    tracer = RequestTracer(collector, target="http://nowhere", label="client-0", model="tiny")
    for number in range(1, 6):
        end_spans(tracer, 1)
        assert collector.num_unseen_exports.acquire(timeout=5), "the thread has not sent"
        assert collector.num_spans == number
    asyncio.run(tracer.close())
    assert [record.getMessage() for record in caplog.records] == [
        "the collector at http://nowhere takes no spans: they are dropped until it does",
        "the collector at http://nowhere takes spans again",
    ]


def test_collector_that_is_slow_gets_a_bounded_number_of_spans(caplog, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "3")
    collector = Collector()
    tracer = RequestTracer(collector, target="http://slow", label="client-0", model="tiny")
    end_spans(tracer, 100)  # blocks for none of them, although the collector answers none
    collector.may_answer.set()
    asyncio.run(tracer.close())
    assert 8 <= collector.num_spans <= 11  # a batch may have been taken from the queue before it was full


def test_close_collector_that_does_not_answer_ends(caplog, monkeypatch):
    monkeypatch.setattr(otel, "FLUSH_SECONDS", 0.05)
    collector = Collector()
    before = threading.enumerate()
    tracer = RequestTracer(collector, target="http://stuck", label="client-0", model="tiny")
    end_spans(tracer, 1)
    asyncio.run(tracer.close())
    assert [record.getMessage() for record in caplog.records] == [
        "the collector at http://stuck has not taken the last spans: they are dropped"
    ]
    assert {thread.daemon for thread in threading.enumerate() if thread not in before} == {True}
    assert not collector.is_shut_down.is_set()
    collector.may_answer.set()
    assert collector.is_shut_down.wait(5), "the threads have not ended"


def test_open_variable_that_cannot_be_used_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    with pytest.raises(ConfigError, match=r"variables of OpenTelemetry \(OTEL_\*\): max_export_batch_size must"):
        RequestTracer.open("http://localhost:4317", label="client-0", model="tiny")
