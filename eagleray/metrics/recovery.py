"""Effects of engine exits on requests, recorded by the client."""

from __future__ import annotations

from eagleray.metrics.families import Families

SILENCE_SECONDS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)


class RecoveryMetrics:
    def __init__(self, families: Families) -> None:
        self._resumed = families.counter(
            "requests_resumed", "Requests that were sent to another engine, or to a replacement, after theirs exited."
        ).at()
        self._recomputed = families.counter(
            "tokens_recomputed",
            "Tokens, of prompts and of what was delivered, that resumed requests were sent again with.",
        ).at()
        self._given_up = families.counter(
            "requests_given_up",
            "Requests that failed because their engines exited more often than the restart budget allows.",
        ).at()
        self._silence = families.histogram(
            "time_to_next_token_after_failure_seconds",
            "Time from the notice that its engine exited to the next token of a request.",
            SILENCE_SECONDS,
        )

    def on_resumed(self, num_requests: int, num_tokens: int) -> None:
        """Record requests that were resumed, with the total number of tokens (prompts and delivered output) sent
        again."""
        self._resumed.add(num_requests)
        self._recomputed.add(num_tokens)

    def on_next_token(self, seconds: float) -> None:
        """Record the time in seconds from the loss of an engine to a resumed request's next token."""
        self._silence.observe(seconds)

    def on_failed(self, num_requests: int) -> None:
        """Record requests that failed because their engines exited too often."""
        self._given_up.add(num_requests)
