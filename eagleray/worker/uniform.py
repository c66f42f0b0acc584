"""Uniform numbers that depend on a seed and a position alone.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) as a counter-based
generator: its n-th output is a hash of (initial state + n * golden gamma), so any position of any stream is reached at
once, for all rows in a dozen numpy operations. The stream of a seed starts at the first output of SplitMix64 for that
seed, so that the streams of related seeds are not shifted copies of each other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
UInts = npt.NDArray[np.uint64]


def stream_of(seed: int) -> np.uint64:
    """The initial state of the stream that belongs to a seed."""
    return _mix(np.array([seed % 2**64], dtype=np.uint64) + GOLDEN_GAMMA)[0]


def uniform(streams: UInts, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number of the open interval (0, 1) for each pair of stream and position, [n]."""
    bits = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(state: UInts) -> UInts:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
