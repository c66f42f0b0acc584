"""What Prometheus is told, under the names that vLLM's dashboards know, with the prefix `eagleray:`.

Belongs to the API servers, any of which tells the totals of all: values are passed in, nothing here knows a client or
an engine. No global registry.
"""

from eagleray.metrics.engine import EngineCollector
from eagleray.metrics.exposition import CONTENT_TYPE, Metrics
from eagleray.metrics.ledger import Ledger
from eagleray.metrics.recovery import RecoveryMetrics
from eagleray.metrics.requests import RequestMetrics, RequestTimer

__all__ = [
    "CONTENT_TYPE",
    "EngineCollector",
    "Ledger",
    "Metrics",
    "RecoveryMetrics",
    "RequestMetrics",
    "RequestTimer",
]
