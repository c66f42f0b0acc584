"""scripts/soak.py: when figures count as growing."""

from __future__ import annotations

from soak import BOUNDS, growth


def census(name: str, values: list[float]) -> list[dict[str, float]]:
    return [{"minute": float(minute), name: value} for minute, value in enumerate(values)]


def test_growth_that_stops_after_the_warm_up_is_none():
    assert growth(census("RSS of all, MB", [100, 700, 900, *[905, 895] * 6])) == []


def test_growth_beyond_the_slack_and_the_slope_is_told():
    (found,) = growth(census("descriptors of the supervisor", [10, 20, *range(20, 40)]))
    assert found.startswith("descriptors of the supervisor: grows by 1.00 a minute")


def test_growth_within_the_slack_is_none():
    assert growth(census("threads", [50, 50, 50, 52, 54, 56])) == []


def test_growth_every_bound_has_an_unbounded_series_that_it_catches():
    for name in BOUNDS:
        assert len(growth(census(name, [1000.0 * minute for minute in range(10)]))) == 1
