"""All metrics of an instance, as the text that `/metrics` of any of its API servers returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from eagleray.messages.control import InstanceState
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats, ExpertLoad
from eagleray.metrics.engine import EngineCollector
from eagleray.metrics.experts import ExpertText
from eagleray.metrics.families import Families
from eagleray.metrics.ledger import Ledger
from eagleray.metrics.processes import ServerProcesses
from eagleray.metrics.recovery import RecoveryMetrics
from eagleray.metrics.requests import RequestMetrics
from eagleray.metrics.vllm_names import WithVllmNames

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """Metrics of one API server: it counts in `ledger` and reports the totals of all.

    `stats` and `expert_load` are called at each scrape for the newest report of every engine, `engine_info` for the
    engines' properties, and `state` for the state of the instance. `max_loras`: most adapters that are served; None
    without adapters. `has_vllm_names`: whether metrics that vLLM has too are also shown under its names. The caller
    closes `ledger`.
    """

    def __init__(
        self,
        model_name: str,
        ledger: Ledger,
        *,
        stats: Callable[[], Iterable[EngineStats]],
        expert_load: Callable[[], Iterable[ExpertLoad]],
        engine_info: Callable[[], EngineInfo | None],
        state: Callable[[], InstanceState],
        max_loras: int | None = None,
        has_vllm_names: bool = False,
    ) -> None:
        families = Families(ledger, model_name=model_name)
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(model_name, stats, engine_info, state, max_loras))
        self._registry.register(ServerProcesses(ledger.processes))
        self._registry.register(families)
        self._shown = WithVllmNames(self._registry) if has_vllm_names else self._registry
        self._experts = ExpertText(model_name, expert_load)
        self.requests = RequestMetrics(families)
        self.recovery = RecoveryMetrics(families)

    def families(self) -> list[Metric]:
        """Return the metrics as the library's objects, without the load of each expert."""
        return list(self._shown.collect())

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._shown) + self._experts.text().encode()
