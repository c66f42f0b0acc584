"""Many measurements of one thing, in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

__all__ = ["Summary", "summary"]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """In the unit of what was measured. Percentiles interpolate linearly between measurements."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    lowest: float
    highest: float


def summary(values: Sequence[float], *, scale: float = 1.0) -> Summary | None:
    """Of `values` times `scale`; None if there are none."""
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
