"""All metrics of one API server, in a registry of their own, as the text that `/metrics` returns."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, ProcessCollector, generate_latest

from eagleray.messages.outputs import EngineStats
from eagleray.metrics.engine import EngineCollector
from eagleray.metrics.requests import RequestMetrics

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """Owns the registry. `stats` is asked at each scrape for the newest word of the engine, None if there is none."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(model_name, stats))
        ProcessCollector(registry=self._registry)
        self.requests = RequestMetrics(model_name, self._registry)
        self._http = Counter(
            "eagleray:http_requests",
            "HTTP requests answered, by route, method and status (499: the client had gone).",
            ["route", "method", "status"],
            registry=self._registry,
        )

    def http_answered(self, route: str, method: str, status: int) -> None:
        """Count one HTTP request. `route` is a route's pattern, not a path: paths would be without bound."""
        self._http.labels(route, method, str(status)).inc()

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)
