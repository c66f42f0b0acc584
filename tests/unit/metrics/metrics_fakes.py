"""Metrics of API servers of one instance, as Prometheus reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from eagleray.messages.control import InstanceState
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats, ExpertLoad
from eagleray.metrics.exposition import Metrics
from eagleray.metrics.ledger import Ledger

INFO = EngineInfo(architecture="tiny", vocab_size=100, max_model_len=64, block_size=16, num_kv_blocks=8)

Make = Callable[..., Metrics]


@contextlib.contextmanager
def instance(directory: Path) -> Iterator[Make]:
    """Yield a function that makes the metrics of a server of this instance: `make(stats, server)`."""
    with contextlib.ExitStack() as stack:

        def make(
            stats: Iterable[EngineStats] = (),
            server: int = 0,
            expert_load: Iterable[ExpertLoad] = (),
            state: InstanceState | None = None,
            max_loras: int | None = None,
            has_vllm_names: bool = False,
        ) -> Metrics:
            ledger = stack.enter_context(contextlib.closing(Ledger.open(directory, server)))
            return Metrics(
                "tiny",
                ledger,
                stats=lambda: stats,
                expert_load=lambda: expert_load,
                engine_info=lambda: INFO,
                state=lambda: state or InstanceState(),
                max_loras=max_loras,
                has_vllm_names=has_vllm_names,
            )

        yield make


def families(metrics):
    return {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}


def samples(metrics):
    """Return values by name and by the label values except `model_name`."""
    return {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "model_name")): sample.value
        for family in families(metrics).values()
        for sample in family.samples
    }
