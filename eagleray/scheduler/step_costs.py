"""The measured time of steps that only decode, as a line over their tokens. Pure.

Whether drafts pay depends on the time of a further token in a step. It is fitted to the steps that have been applied,
of which older ones count less. A wrong estimate costs time and changes no token.
"""

from __future__ import annotations

FORGET = 0.99
"""Weight of a step relative to the one after it."""

PRIOR_SHARE = 0.15
"""Time of a further token before any is measured, in units of the time per token. It is low, so that drafts are tried,
which shows what they cost."""

PRIOR_WEIGHT = 4.0
"""Weight of that assumption, as a variance of tokens of a step."""

MAX_EXCESS = 4.0
"""A step counts at most this many times as long as expected, because something else was delayed."""


class StepCosts:
    """Decayed moments of tokens and seconds of steps."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._tokens_squared = 0.0
        self._product = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count a step that computed these tokens, one for each row and the drafts."""
        if self._weight > 1:
            seconds = min(seconds, MAX_EXCESS * max(self._expected(num_tokens), self._seconds / self._weight))
        self._weight = FORGET * self._weight + 1
        self._tokens = FORGET * self._tokens + num_tokens
        self._seconds = FORGET * self._seconds + seconds
        self._tokens_squared = FORGET * self._tokens_squared + num_tokens * num_tokens
        self._product = FORGET * self._product + num_tokens * seconds

    def share_of_token(self, num_tokens: int) -> float:
        """Return the time of a further token, in units of the time per token of a step with `num_tokens` tokens."""
        if self._weight == 0:
            return PRIOR_SHARE
        return max(0.0, self._slope() * num_tokens / max(self._expected(num_tokens), 1e-9))

    def _expected(self, num_tokens: int) -> float:
        """Return the time of a step with these tokens, at least half of that of an average step per token."""
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        fitted = mean_seconds + self._slope() * (num_tokens - mean_tokens)
        return max(fitted, 0.5 * mean_seconds * min(1.0, num_tokens / mean_tokens))

    def _slope(self) -> float:
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_squared / self._weight - mean_tokens**2
        covariance = self._product / self._weight - mean_tokens * mean_seconds
        prior = PRIOR_SHARE * mean_seconds / mean_tokens
        weight = PRIOR_WEIGHT / self._weight
        return max(0.0, (covariance + weight * prior) / (variance + weight))
