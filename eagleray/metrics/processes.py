"""System values of each API server's process (not summed): memory, processor time, files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class ServerProcesses(Collector):
    """Collector; `processes` is called at each scrape for the process ids by server. Exited processes are left out."""

    def __init__(self, processes: Callable[[], Mapping[int, int]]) -> None:
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for server, pid in self._processes().items():
            for metric in _read(pid):
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.add_sample(sample.name, {**sample.labels, "server": str(server)}, sample.value)
        return families.values()


def _read(pid: int) -> Iterable[Metric]:
    return ProcessCollector(pid=lambda: pid, registry=None).collect()
