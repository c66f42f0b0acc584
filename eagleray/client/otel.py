"""Spans of OpenTelemetry for requests, sent to a collector by a thread of its own, so that no request waits for it.

Imported only if the option `otlp_traces_endpoint` is set. The client owns the tracer, and each request its span.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from eagleray.config.traces import TRACES_PROTOCOL, traces_protocol
from eagleray.log import get_logger
from eagleray.messages.adapters import Adapter
from eagleray.messages.outputs import Chunk
from eagleray.messages.sampling import SamplingParams

if TYPE_CHECKING:
    from eagleray.client.request import ClientRequest
    from eagleray.client.tracing import RequestOrigin

logger = get_logger(__name__)

SPAN_NAME = "llm_request"
PROPAGATOR = TraceContextTextMapPropagator()

MAX_QUEUED_SPANS = 4096
MAX_BATCH_SPANS = 512
SEND_INTERVAL_SECONDS = 1.0
CLOSE_POLL_SECONDS = 0.02
FLUSH_SECONDS = 3.0
"""Time in which the last spans are sent when the client is closed."""


class RequestTracer:
    """Makes the spans of one client. `label` names its process, and `model` is the name that answers show."""

    def __init__(self, exporter: SpanExporter, *, target: str, label: str, model: str) -> None:
        self._model = model
        self._sender = SpanSender(exporter, target)
        resource = Resource({"service.name": "eagleray", "service.instance.id": label, "process.pid": os.getpid()})
        provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()),  # variables such as OTEL_SERVICE_NAME
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._sender)
        self._tracer = provider.get_tracer("eagleray")

    @classmethod
    def open(cls, endpoint: str, *, label: str, model: str) -> RequestTracer:
        """Return a tracer that sends to `endpoint` by the protocol that the environment names."""
        protocol = traces_protocol()
        # Without handlers of the program, warnings of the library would get around the format of the log.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        exporter: SpanExporter
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            exporter = GrpcExporter(endpoint, insecure=not endpoint.startswith("https://"))
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            exporter = HttpExporter(endpoint)
        return cls(exporter, target=f"{endpoint} ({TRACES_PROTOCOL}={protocol})", label=label, model=model)

    def begin(self, origin: RequestOrigin, params: SamplingParams | None, adapter: Adapter | None) -> RequestTrace:
        """Begin the span of a request. `params` None: for a vector."""
        span = self._tracer.start_span(
            SPAN_NAME,
            context=PROPAGATOR.extract(origin.headers),
            kind=SpanKind.SERVER,
            start_time=time.time_ns() - int(1e9 * (time.perf_counter() - origin.arrival)),
        )
        return RequestTrace(span, origin, params, self._model if adapter is None else adapter.name)

    async def close(self) -> None:
        """Send the last spans, for `FLUSH_SECONDS` at most."""
        await self._sender.close()


@dataclass(slots=True)
class RequestTrace:
    """The span of a request, and what its attributes need beside the request itself."""

    span: Span
    origin: RequestOrigin
    params: SamplingParams | None
    model: str
    """Name of the model or adapter that computes the request."""
    queue_time: float | None = None
    """Seconds in the queue of the engine that sent the first output."""
    prefill_time: float | None = None
    """Seconds from the end of that queue to the first output."""

    def add_event(self, name: str, **attributes: str) -> None:
        """Add an event that happens now."""
        self.span.add_event(name, attributes)

    def add_first_output(self, chunk: Chunk) -> None:
        """Record the times of a chunk with the first output of an engine. Later engines do not count."""
        if self.queue_time is None:
            self.queue_time, self.prefill_time = chunk.queue_time, chunk.prefill_time

    def end(self, request: ClientRequest) -> None:
        """End the span of the request, which has just ended."""
        self.span.set_attributes(self._attributes(request, time.perf_counter()))
        if request.failure is not None:
            self.span.set_attribute("error.type", type(request.failure).__name__)
            self.span.set_status(StatusCode.ERROR, str(request.failure))
        self.span.end()

    def _attributes(self, request: ClientRequest, now: float) -> dict[str, Any]:
        """Return the attributes of the span, by the names of vLLM."""
        values: dict[str, Any] = {
            "gen_ai.request.id": self.origin.request_id,
            "gen_ai.response.model": self.model,
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(completion.token_ids) for completion in request.completions),
            "gen_ai.latency.e2e": now - self.origin.arrival,
            "gen_ai.latency.time_in_queue": self.queue_time,
            "gen_ai.latency.time_in_model_prefill": self.prefill_time,
        }
        if reasons := [each.finish_reason.value for each in request.completions if each.finish_reason is not None]:
            values["gen_ai.response.finish_reasons"] = reasons
        if self.params is not None:
            values |= {
                "gen_ai.request.n": self.params.n,
                "gen_ai.request.temperature": self.params.temperature,
                "gen_ai.request.top_p": self.params.top_p,
                "gen_ai.request.max_tokens": self.params.max_tokens,
            }
        if request.first_token_at is not None:
            decode_time = now - request.first_token_at
            values |= {
                "gen_ai.latency.time_to_first_token": request.first_token_at - self.origin.arrival,
                "gen_ai.latency.time_in_model_decode": decode_time,
                "gen_ai.latency.time_in_model_inference": (self.prefill_time or 0.0) + decode_time,
            }
        return {name: value for name, value in values.items() if value is not None}


class SpanSender(SpanProcessor):
    """Sends spans in batches. They are dropped while the collector refuses them, and while too many of them wait.
    `target` names the collector in the log."""

    def __init__(self, exporter: SpanExporter, target: str) -> None:
        self._exporter = exporter
        self._target = target
        self._spans: deque[ReadableSpan] = deque()
        self._is_full = False
        """Whether a span found no place since the last batch."""
        self._is_dropping = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eagleray-traces", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        if len(self._spans) < MAX_QUEUED_SPANS:
            self._spans.append(span)
        else:
            self._is_full = True

    async def close(self) -> None:
        """Wait until all spans have been sent, for `FLUSH_SECONDS` at most."""
        self._closing.set()
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(CLOSE_POLL_SECONDS)
        self._exporter.shutdown()  # ends the attempts to send

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(SEND_INTERVAL_SECONDS)
            while self._spans:
                self._send([self._spans.popleft() for _ in range(min(len(self._spans), MAX_BATCH_SPANS))])

    def _send(self, spans: list[ReadableSpan]) -> None:
        try:
            is_accepted = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            logger.debug("spans could not be sent", exc_info=True)
            is_accepted = False
        was_full, self._is_full = self._is_full, False
        if (was_full or not is_accepted) and not self._is_dropping:
            self._is_dropping = True
            effect = "fewer spans than there are: some" if is_accepted else "no spans: they"
            logger.warning("the collector at %s takes %s are dropped until it takes all", self._target, effect)
        elif is_accepted and self._is_dropping and not self._spans:
            self._is_dropping = False
            logger.info("the collector at %s takes all spans again", self._target)
