"""The metrics of an instance as metrics of Ray, which its agents collect from all nodes.

A sample `eagleray:NAME` becomes `eagleray_NAME`, because Ray no longer takes colons, with its labels and those of
Serve. A counter is counted up by its growth. The buckets, sum and count of a histogram become gauges: Ray's histograms
take single observations, of which there would be one for each token. Ray discards everything if no agent runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client.core import Metric
from ray.serve.metrics import Counter, Gauge

from eagleray.log import get_logger
from eagleray.serve.mirrored_samples import Labels, MirroredSample, growth, mirrored_samples

logger = get_logger(__name__)

PERIOD_SECONDS = 5.0
"""Time between two updates. Ray's agents are sent new values every 10 s."""


class MetricsMirror:
    """Writes the samples of `collect` to Ray's metrics every few seconds. `collect` is called in the event loop."""

    def __init__(self, collect: Callable[[], Sequence[Metric]]) -> None:
        self._collect = collect
        self._metrics: dict[str, Any] = {}
        self._counted: dict[tuple[str, Labels], float] = {}
        """Last value of each counter."""

    async def run(self) -> None:
        """Update Ray's metrics until this is cancelled, in a thread, because there are hundreds."""
        while True:
            try:
                await asyncio.to_thread(self._write, mirrored_samples(self._collect()))
            except Exception:  # metrics must not end a replica
                logger.exception("the metrics were not written to Ray's; the next try is in %g s", PERIOD_SECONDS)
            await asyncio.sleep(PERIOD_SECONDS)

    def _write(self, samples: Sequence[MirroredSample]) -> None:
        for sample in samples:
            metric = self._metric(sample)
            if not sample.is_counter:
                metric.set(sample.value, dict(sample.labels))
                continue
            key = sample.name, sample.labels
            if added := growth(sample.value, self._counted.get(key, 0.0)):
                metric.inc(added, dict(sample.labels))
            self._counted[key] = sample.value

    def _metric(self, sample: MirroredSample) -> Any:
        if sample.name not in self._metrics:
            kind: Any = Counter if sample.is_counter else Gauge
            self._metrics[sample.name] = kind(sample.name, sample.text, tuple(name for name, _ in sample.labels))
        return self._metrics[sample.name]
