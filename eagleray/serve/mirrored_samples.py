"""Samples of Prometheus' families as values for metrics of Ray. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

COUNTER_SUFFIX = "_total"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MirroredSample:
    name: str
    text: str
    labels: Labels
    value: float
    is_counter: bool


def mirrored_samples(families: Sequence[Metric]) -> list[MirroredSample]:
    """Return the samples of the families under the names that Ray gets. Ray adds the suffix of counters again. Pure."""
    return [
        MirroredSample(
            name=_name(sample.name.removesuffix(COUNTER_SUFFIX) if family.type == "counter" else sample.name),
            text=family.documentation,
            labels=tuple(sample.labels.items()),
            value=sample.value,
            is_counter=family.type == "counter",
        )
        for family in families
        for sample in family.samples
    ]


def growth(value: float, last: float) -> float:
    """Return by how much a counter has grown. One that is smaller began again, with a new process. Pure."""
    return value - last if value >= last else value


def _name(name: str) -> str:
    return name.replace(":", "_")
