"""The autoscaling policy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eagleray.serve.autoscaling import RUNNING, WAITING, scale_by_queue


def desired(running: list[float], waiting: list[float], *, queued: float | None = 0.0, target: float = 48.0) -> float:
    recorded = {RUNNING: dict(enumerate(running)), WAITING: dict(enumerate(waiting))}
    config = SimpleNamespace(get_target_ongoing_requests=lambda: target)
    context = SimpleNamespace(config=config, aggregated_metrics=recorded, total_queued_requests=queued)
    return scale_by_queue(context)[0]


@pytest.mark.parametrize(
    ("running", "waiting", "replicas"),
    [
        ([24.0], [0.0], 0.5),
        ([48.0, 24.0], [0.0, 0.0], 1.5),
        ([20.0], [20.0], 2.0),  # the cache holds 20 sequences, and as many wait
        ([64.0], [32.0], 2.0),  # more than the target run
        ([0.0], [8.0], 8.0),  # one at a time
        ([24.0], [0.4], 24.4 / 48),
    ],
)
def test_scale_by_queue_counts_replicas_that_the_load_fills(running, waiting, replicas):
    assert desired(running, waiting) == pytest.approx(replicas)


def test_scale_by_queue_requests_that_wait_in_serve_count():
    assert desired([48.0], [0.0], queued=96.0) == pytest.approx(3.0)
    assert desired([], [], queued=None) == 0.0
