"""scripts/soak.py: growth of figures beyond their bounds."""

from __future__ import annotations

from soak import BOUNDS, growth


def census(name: str, values: list[float]) -> list[dict[str, float]]:
    return [{"minute": float(minute), name: value} for minute, value in enumerate(values)]


def test_growth_only_in_the_warm_up_is_not_reported():
    assert growth(census("RSS of all, MB", [100, 700, 900, *[905, 895] * 6])) == []


def test_growth_beyond_slack_and_slope_is_reported():
    (found,) = growth(census("descriptors of the supervisor", [10, 20, *range(20, 40)]))
    assert found.startswith("descriptors of the supervisor: grows by 1.00 a minute")


def test_growth_within_the_slack_is_not_reported():
    assert growth(census("threads", [50, 50, 50, 52, 54, 56])) == []


def test_growth_unbounded_series_is_reported_for_every_bound():
    for name in BOUNDS:
        assert len(growth(census(name, [1000.0 * minute for minute in range(10)]))) == 1
