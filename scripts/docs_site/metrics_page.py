"""Reference of the metrics, read from the text that `/metrics` of a server with one request has."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from docs_site.markdown import code, plain, table
from eagleray.identity import EngineId
from eagleray.messages.control import InstanceState
from eagleray.messages.distributions import BOUNDS, Distribution, EngineDistributions
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats, ExpertLoad, FinishReason
from eagleray.metrics.exposition import Metrics
from eagleray.metrics.ledger import Ledger
from eagleray.metrics.vllm_names import OUR_PREFIX, VLLM_PREFIX

HEAD = """# Metrics

`/metrics` of any API server returns the totals of all of them, in Prometheus' text format. A counter's series ends in
`_total`; a histogram has the series `_bucket`, `_sum` and `_count`. With `--enable-vllm-metrics` the metrics that are
marked so are also shown as `vllm:…`, with the same labels. `deploy/grafana/eagleray.json` is a dashboard for Grafana.

"""

INFO = EngineInfo(architecture="", vocab_size=1, max_model_len=1, block_size=1, num_kv_blocks=1)
BUCKET = "le"


def page() -> str:
    families = list(read_families())
    theirs = {family.name.removeprefix(VLLM_PREFIX) for family in families if family.name.startswith(VLLM_PREFIX)}
    rows = [
        (code(_series_name(family)), _meaning(family, is_shared=family.name.removeprefix(OUR_PREFIX) in theirs))
        for family in families
        if not family.name.startswith(VLLM_PREFIX)
    ]
    return HEAD + table(("metric", "meaning"), rows)


def _meaning(family: Metric, *, is_shared: bool) -> str:
    labels = ", ".join(code(label) for label in labels_of(family))
    facts = [f"{family.type} by {labels}", *(["also `vllm:`"] if is_shared else [])]
    return f"{plain(family.documentation)}<br>{'; '.join(facts)}"


def read_families() -> Iterable[Metric]:
    """Return every family of metrics, each with a sample at least."""
    with tempfile.TemporaryDirectory() as directory, closing(Ledger.open(Path(directory), 0)) as ledger:
        metrics = _metrics(ledger)
        timer = metrics.requests.begin(arrival=time.perf_counter(), num_prompt_tokens=1, n=1, max_tokens=None)
        timer.tokens(0, 1, EngineId("", 0))
        timer.finished(0, FinishReason.STOP, 1)
        metrics.requests.http_answered("/", "GET", 200)
        return list(text_string_to_metric_families(metrics.text().decode()))


def labels_of(family: Metric) -> list[str]:
    """Return the labels of a family's samples. Raises `ValueError` for a family without samples."""
    if not family.samples:
        raise ValueError(f"the metric {family.name} has no sample: make the page's server count one")
    return [label for label in family.samples[0].labels if label != BUCKET]


def _metrics(ledger: Ledger) -> Metrics:
    """Return the metrics of a server with an engine that has counted nothing yet."""
    counted = {name: Distribution([0] * (len(bounds) + 1), 0.0) for name, bounds in BOUNDS.items()}
    zeros = dict.fromkeys(_counts(), 0)
    distributions = EngineDistributions(**counted)
    stats = EngineStats(engine=EngineId("", 0), distributions=distributions, accepted_by_position=[0], **zeros)
    return Metrics(
        "",
        ledger,
        stats=lambda: [stats],
        expert_load=lambda: [ExpertLoad(engine=stats.engine, counts=np.zeros((1, 1), np.int64))],
        engine_info=lambda: INFO,
        state=InstanceState,
        max_loras=1,
        has_vllm_names=True,
    )


def _counts() -> Iterator[str]:
    return (name for name in EngineStats.__struct_fields__ if name.startswith("num_"))


def _series_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name
