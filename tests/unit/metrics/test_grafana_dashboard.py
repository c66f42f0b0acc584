"""The dashboard of deploy/grafana reads metrics and labels that exist."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from metrics_fakes import families
from prometheus_client import Metric

from eagleray.identity import EngineId
from eagleray.messages.distributions import BOUNDS, Distribution, EngineDistributions
from eagleray.messages.outputs import EngineStats, FinishReason

DASHBOARD = json.loads((Path(__file__).parents[3] / "deploy/grafana/eagleray.json").read_text("utf-8"))
SELECTED = re.compile(r"(eagleray:\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"by \((\w+)\)")


def queries() -> list[str]:
    variables = [entry["query"]["query"] for entry in DASHBOARD["templating"]["list"] if entry["type"] == "query"]
    return variables + [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.fixture
def series(make) -> dict[str, set[str]]:
    """Labels of every sample of a server that has answered a request, by the sample's name."""
    counted = {name: Distribution([0] * (len(bounds) + 1), 0.0) for name, bounds in BOUNDS.items()}
    counts = dict.fromkeys((name for name in EngineStats.__struct_fields__ if name.startswith("num_")), 0)
    engine = EngineId("test", 0)
    metrics = make([EngineStats(engine=engine, distributions=EngineDistributions(**counted), **counts)])
    timer = metrics.requests.begin(arrival=time.perf_counter(), num_prompt_tokens=3, n=1, max_tokens=None)
    timer.tokens(0, 1, engine)
    timer.finished(0, FinishReason.STOP, 1)
    metrics.requests.http_answered("/live", "GET", 200)
    found: list[Metric] = list(families(metrics).values())
    return {sample.name: set(sample.labels) for family in found for sample in family.samples}


@pytest.mark.parametrize("query", queries())
def test_dashboard_query_reads_series_that_exist(series, query):
    selected = SELECTED.findall(query)
    assert selected
    for name, matchers in selected:
        assert name in series
        wanted = {matcher.split("=")[0] for matcher in matchers.split(",") if matcher} | set(GROUPED.findall(query))
        assert wanted <= series[name]


def test_dashboard_panels_have_own_ids_and_places():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
