"""Arrival times of requests. Pure."""

from __future__ import annotations

import math

import numpy as np

from eagleray.errors import UserError


def arrival_times(rng: np.random.Generator, count: int, *, rate: float, burstiness: float = 1.0) -> list[float]:
    """Return the seconds after the start at which each of `count` requests is sent, the first one at 0.

    `rate` is in requests per second; infinity sends all at once. Times between arrivals have a gamma distribution of
    shape `burstiness` and mean `1 / rate`: 1 is a Poisson process, less gives bursts, more gives even gaps.

    Raises `UserError` for a rate or burstiness that is not greater than 0.
    """
    if not rate > 0:
        raise UserError(f"--request-rate must be greater than 0 requests a second, or inf, but it is {rate:g}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise UserError(f"--burstiness must be greater than 0 (1: a Poisson process), but it is {burstiness:g}")
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), size=count)
    times: list[float] = np.cumsum(gaps).tolist()
    return [time - times[0] for time in times]
