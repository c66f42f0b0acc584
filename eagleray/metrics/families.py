"""Prometheus metric families over the numbers of a ledger. Each is reported as the total of all API servers."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from eagleray.metrics.ledger import Ledger, Tally, Totals

SUM = "sum"


class Counter:
    """Counter with labels. `constant`: labels with the same value on every sample."""

    def __init__(
        self, ledger: Ledger, name: str, text: str, *, labels: Sequence[str] = (), constant: Mapping[str, str]
    ) -> None:
        self._ledger = ledger
        self.name = name
        self._text = text
        self._labels = [*constant, *labels]
        self._constant = list(constant.values())

    def at(self, *values: str) -> Tally:
        """Return the tally of these label values, which is reported from now on even if it is 0."""
        return self._ledger.tally(self.name, *values)

    def report(self, totals: Totals) -> Metric:
        family = CounterMetricFamily(self.name, self._text, labels=self._labels)
        for values, total in sorted(totals[self.name].items()):
            family.add_metric([*self._constant, *values], total)
        return family


class Histogram:
    """Histogram of sizes: counts by ascending upper `bounds`, and the sum, for each combination of label values."""

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        text: str,
        *,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        constant: Mapping[str, str],
    ) -> None:
        self._ledger = ledger
        self.name = name
        self._text = text
        self._constant = list(constant.values())
        self._labels = [*constant, *labels]
        self.bounds = bounds
        self.marks = bucket_marks(bounds)
        """Values of the label `le` of the buckets, see `SUM` for the sum."""
        self._tallies: dict[tuple[str, ...], tuple[list[Tally], Tally]] = {}
        if not labels:
            self._at(())  # reported from the beginning

    def observe(self, value: float, *values: str) -> None:
        """Count `value` in the series of these label values."""
        counts, total = self._at(values)
        counts[bisect_left(self.bounds, value)].add()
        total.add(value)

    def _at(self, values: tuple[str, ...]) -> tuple[list[Tally], Tally]:
        if values not in self._tallies:
            counts = [self._ledger.tally(self.name, *values, mark) for mark in self.marks]
            self._tallies[values] = counts, self._ledger.tally(self.name, *values, SUM)
        return self._tallies[values]

    def report(self, totals: Totals) -> Metric:
        parts = totals[self.name]
        family = HistogramMetricFamily(self.name, self._text, labels=self._labels)
        for values in sorted({labels[:-1] for labels in parts}):
            counts = itertools.accumulate(parts.get((*values, mark), 0.0) for mark in self.marks)
            buckets = list(zip(self.marks, counts, strict=True))
            family.add_metric([*self._constant, *values], buckets, parts.get((*values, SUM), 0.0))
        return family


def bucket_marks(bounds: Sequence[float]) -> list[str]:
    """Return the values of the label `le` of a histogram with these upper bounds, and of its last bucket."""
    return [_mark(bound) for bound in (*bounds, math.inf)]


def _mark(bound: float) -> str:
    """Format a bucket bound as the library's own histograms do: 0.5, 100.0, 1e+06."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


class Families(Collector):
    """Creates the families of one ledger and reports them all."""

    def __init__(self, ledger: Ledger, *, model_name: str) -> None:
        self._ledger = ledger
        self._model = {"model_name": model_name}
        self._each: list[Counter | Histogram] = []

    def counter(self, name: str, text: str, labels: Sequence[str] = (), *, is_of_model: bool = True) -> Counter:
        """Create a counter `eagleray:NAME_total`, with a label `model_name` if it `is_of_model`."""
        constant = self._model if is_of_model else {}
        counter = Counter(self._ledger, f"eagleray:{name}", text, labels=labels, constant=constant)
        self._each.append(counter)
        return counter

    def histogram(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        """Create a histogram `eagleray:NAME`, with a label `model_name`."""
        histogram = Histogram(
            self._ledger, f"eagleray:{name}", text, bounds=bounds, labels=labels, constant=self._model
        )
        self._each.append(histogram)
        return histogram

    def collect(self) -> Iterable[Metric]:
        totals = self._ledger.totals()
        return [family.report(totals) for family in self._each]
