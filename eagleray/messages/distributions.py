"""Histograms that an engine counts and reports in its stats, with their bounds."""

from __future__ import annotations

import msgspec

SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS = (*(step * 10**exponent for exponent in range(6) for step in (1, 2, 5)), 1_000_000)
MASK_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
COMPILE_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """Counts of values between the bounds of one histogram, and the sum of the values."""

    counts: list[int]
    """Number of values up to each bound and above the one before, then of those above the last bound."""
    total: float


class EngineDistributions(msgspec.Struct, frozen=True, kw_only=True):
    """Histograms of an engine. Times are in seconds by the engine's clock, and belong to the engine of the stats: a
    request that moves to another engine begins again there."""

    step_tokens: Distribution
    """Tokens of a step, computed for prompts or generated."""
    prefill_tokens: Distribution
    """Prompt tokens of a request that were not in the cache at its first admission."""
    queue_time: Distribution
    """From the arrival of a request to its first admission."""
    prefill_time: Distribution
    """From the first admission of a request to its first token."""
    decode_time: Distribution
    """From the first token of a request to its end."""
    inference_time: Distribution
    """From the first admission of a request to its end."""
    preemptions: Distribution
    """Preemptions of a request that has ended."""
    mask_time: Distribution
    """Time of the threads that compute the masks of a step with grammars."""
    grammar_time: Distribution
    """From the first question for a grammar to the reply of all workers that it is compiled, or cannot be."""


BOUNDS: dict[str, tuple[float, ...]] = {
    "step_tokens": STEP_TOKENS,
    "prefill_tokens": TOKENS,
    "queue_time": SECONDS,
    "prefill_time": SECONDS,
    "decode_time": SECONDS,
    "inference_time": SECONDS,
    "preemptions": PREEMPTIONS,
    "mask_time": MASK_SECONDS,
    "grammar_time": COMPILE_SECONDS,
}
"""Ascending upper bounds of each histogram of `EngineDistributions`."""
