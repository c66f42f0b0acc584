"""Traces of OpenTelemetry, without its packages: `otel`, which makes the spans, is imported by `open_tracer` alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from eagleray.config.resolve import served_names
from eagleray.config.sections import Config
from eagleray.identity import ClientId

if TYPE_CHECKING:
    from eagleray.client.otel import RequestTracer

TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers (W3C) that name the span in which a request was sent."""


class RequestOrigin(NamedTuple):
    """Place and time at which a user's request came, for its span and its line of the log."""

    request_id: str
    """Id as the user knows it."""
    arrival: float
    """Time at which the user's request came, by `time.perf_counter`."""
    headers: Mapping[str, str]
    """The headers of `TRACE_HEADERS` that came with it."""
    path: str | None = None
    """Path of the HTTP request; None: it did not come by HTTP."""


def make_origin(request_id: str, headers: Mapping[str, str] | None) -> RequestOrigin:
    """Return the origin of a request that comes now, not by HTTP."""
    return RequestOrigin(request_id, time.perf_counter(), headers or {})


def open_tracer(config: Config, client_id: ClientId) -> RequestTracer | None:
    """Return the tracer of a client, or None without the option `otlp_traces_endpoint`."""
    if not config.observability.otlp_traces_endpoint:
        return None
    from eagleray.client.otel import RequestTracer  # the packages are an extra, and their import takes 0.5 s

    return RequestTracer.open(
        config.observability.otlp_traces_endpoint, label=client_id.label, model=served_names(config.model)[0]
    )
