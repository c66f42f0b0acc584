"""Statistics of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics in the unit of the measurements. Percentiles interpolate linearly between measurements."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    lowest: float
    highest: float


def summarize(values: Sequence[float], *, scale: float = 1.0) -> Summary | None:
    """Return the statistics of `values` times `scale`; None if `values` is empty."""
    if not len(values):
        return None
    scaled = np.asarray(values, dtype=float) * scale
    p50, p90, p99 = np.percentile(scaled, [50, 90, 99]).tolist()
    return Summary(
        count=len(scaled),
        mean=float(scaled.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        lowest=float(scaled.min()),
        highest=float(scaled.max()),
    )
