"""Spans of OpenTelemetry for requests, sent to a collector by a thread of the SDK, so that no request waits for it.

Imported only if the option `otlp_traces_endpoint` is set. The client owns the tracer, and each request its span.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from eagleray.config.traces import TRACES_PROTOCOL, traces_protocol
from eagleray.errors import ConfigError
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

CLOSE_POLL_SECONDS = 0.02
FLUSH_SECONDS = 3.0
"""Time in which the last spans are sent when the client is closed."""


class RequestTracer:
    """Makes the spans of one client. `label` names its process, and `model` is the name that answers show."""

    def __init__(self, exporter: SpanExporter, *, target: str, label: str, model: str) -> None:
        self._model = model
        self._target = target
        resource = Resource({"service.name": "eagleray", "service.instance.id": label, "process.pid": os.getpid()})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()),  # variables such as OTEL_SERVICE_NAME
            shutdown_on_exit=False,  # `close` does that, and takes less time
        )
        self._provider.add_span_processor(BatchSpanProcessor(WatchedExporter(exporter, target)))
        self._tracer = self._provider.get_tracer("eagleray")

    @classmethod
    def open(cls, endpoint: str, *, label: str, model: str) -> RequestTracer:
        """Return a tracer that sends to `endpoint` by the protocol that the environment names. Raises `ConfigError` for
        variables of OpenTelemetry that cannot be used."""
        protocol = traces_protocol()
        # Without handlers of the program, warnings of the library would get around the format of the log.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        try:
            exporter = _open_exporter(endpoint, protocol)
            return cls(exporter, target=f"{endpoint} ({TRACES_PROTOCOL}={protocol})", label=label, model=model)
        except ValueError as error:
            raise ConfigError(f"option `otlp_traces_endpoint`: variables of OpenTelemetry (OTEL_*): {error}") from None

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
        # `shutdown` may take 30 s and cannot be cut short: its thread continues, but does not keep the process alive.
        thread = threading.Thread(target=self._provider.shutdown, name="eagleray-traces", daemon=True)
        thread.start()
        deadline = time.monotonic() + FLUSH_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(CLOSE_POLL_SECONDS)
        if thread.is_alive():
            logger.warning("the collector at %s has not taken the last spans: they are dropped", self._target)


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


class WatchedExporter(SpanExporter):
    """Exporter that logs when the collector starts to refuse spans and when it takes them again. `target` names the
    collector in the log."""

    def __init__(self, exporter: SpanExporter, target: str) -> None:
        self._exporter = exporter
        self._target = target
        self._is_refused = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:
            logger.debug("spans could not be sent", exc_info=True)
            result = SpanExportResult.FAILURE
        was_refused, self._is_refused = self._is_refused, result is not SpanExportResult.SUCCESS
        if self._is_refused and not was_refused:
            logger.warning("the collector at %s takes no spans: they are dropped until it does", self._target)
        elif was_refused and not self._is_refused:
            logger.info("the collector at %s takes spans again", self._target)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _open_exporter(endpoint: str, protocol: str) -> SpanExporter:
    """Return the exporter of a protocol. Only its package is imported."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint, insecure=not endpoint.startswith("https://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint)
