"""The order of runs that are compared."""

from __future__ import annotations

import pytest

from eagleray.errors import UserError
from eagleray_bench.alternating_runs import AlternatingRuns


def test_order_every_second_round_is_reversed():
    assert list(AlternatingRuns(count=3).order(["a", "b"])) == ["a", "b", "b", "a", "a", "b"]


def test_alternating_runs_count_below_1_raises():
    with pytest.raises(UserError, match="--rounds must be at least 1, but it is 0"):
        AlternatingRuns(count=0)
