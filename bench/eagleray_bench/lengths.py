"""Lengths of requests, and the prefixes that their prompts share. Pure: drawn from a random generator.

The distribution `sharegpt-like` resembles the conversations of ShareGPT without containing any of them: the lengths of
prompt and answer are log-normal and independent. Their means before the cut, 161 and 338 tokens, are the means that
Kwon et al. ("Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, section 6.1) give
for ShareGPT. Each is cut to 4 to 1,024 tokens, as samples of ShareGPT usually are; that leaves means of 145 and 311.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

SHAREGPT_INPUT = (69.0, 1.3)
"""Median in tokens and standard deviation of the logarithm."""
SHAREGPT_OUTPUT = (225.0, 0.9)
SHAREGPT_LIMITS = (4, 1024)


@dataclass(frozen=True, kw_only=True)
class RequestShape:
    """Lengths of one request, in tokens."""

    num_input: int
    """Length of the prompt, including the prefix."""
    num_output: int
    prefix: int | None = None
    """Number of the prefix that the request shares with others."""
    num_prefix: int = 0
    """Length of that prefix."""

    def cut(self, max_len: int) -> RequestShape:
        """Shorten to at most `max_len` tokens (at least 2) of prompt and answer together, the answer first."""
        num_input = min(self.num_input, max_len - 1)
        return replace(
            self,
            num_input=num_input,
            num_output=min(self.num_output, max_len - num_input),
            num_prefix=min(self.num_prefix, num_input),
        )


def uniform(
    rng: np.random.Generator, count: int, *, input_len: int, output_len: int, range_ratio: float
) -> list[RequestShape]:
    """Draw lengths uniformly between `1 - range_ratio` and `1 + range_ratio` times the given ones."""
    inputs = _spread(rng, count, input_len, range_ratio)
    outputs = _spread(rng, count, output_len, range_ratio)
    return [RequestShape(num_input=i, num_output=o) for i, o in zip(inputs, outputs, strict=True)]


def sharegpt_like(rng: np.random.Generator, count: int) -> list[RequestShape]:
    """Draw lengths from the distribution that the module's docstring describes."""
    inputs = _log_normal(rng, count, *SHAREGPT_INPUT)
    outputs = _log_normal(rng, count, *SHAREGPT_OUTPUT)
    return [RequestShape(num_input=i, num_output=o) for i, o in zip(inputs, outputs, strict=True)]


def prefix_repetition(
    rng: np.random.Generator, *, num_prefixes: int, prefix_len: int, uses: int, suffixes: list[RequestShape]
) -> list[RequestShape]:
    """Put each prefix before `uses` of the `num_prefixes * uses` suffixes, in random order."""
    prefixes = rng.permutation(np.repeat(np.arange(num_prefixes), uses)).tolist()
    return [
        replace(suffix, num_input=prefix_len + suffix.num_input, prefix=prefix, num_prefix=prefix_len)
        for prefix, suffix in zip(prefixes, suffixes, strict=True)
    ]


def _spread(rng: np.random.Generator, count: int, length: int, ratio: float) -> list[int]:
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    lengths: list[int] = rng.integers(low, high, size=count, endpoint=True).tolist()
    return lengths


def _log_normal(rng: np.random.Generator, count: int, median: float, sigma: float) -> list[int]:
    drawn = np.rint(rng.lognormal(math.log(median), sigma, size=count))
    lengths: list[int] = drawn.clip(*SHAREGPT_LIMITS).astype(int).tolist()
    return lengths
