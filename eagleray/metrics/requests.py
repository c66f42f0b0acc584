"""Latencies, sizes, parameters and finish reasons of requests, as their API server measures them.

They carry no `engine` label, because a request may move from one engine to another, except for the time to the first
token: it has the engine that sent the token.
"""

from __future__ import annotations

import time

from eagleray.identity import EngineId
from eagleray.messages.distributions import SECONDS, TOKENS
from eagleray.messages.outputs import FinishReason
from eagleray.metrics.families import Families

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
MAX_ENGINE_LABELS = 200
"""Number of engines that have a label of their own; the others share one, because a ledger has a fixed size."""


class RequestMetrics:
    """Metric families about generating requests, and about HTTP requests of every route."""

    def __init__(self, families: Families) -> None:
        histogram = families.histogram
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            FIRST_TOKEN_SECONDS,
            ["engine"],
        )
        self.between_tokens = histogram(
            "inter_token_latency_seconds", "Between a token and the next one of a streamed completion.", TOKEN_SECONDS
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a token after the first one of a completion.",
            TOKEN_SECONDS,
        )
        self.latency = histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to the end of a completion.", SECONDS
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.generation_tokens = histogram("request_generation_tokens", "Tokens of a completion.", TOKENS)
        self.max_generation_tokens = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest completion of a request.", TOKENS
        )
        self.params_n = histogram("request_params_n", "Parameter `n` of the requests.", (1, 2, 5, 10, 20))
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "Parameter `max_tokens` of the requests that set it.", TOKENS
        )
        self.success = families.counter(
            "request_success", "Completions that ended, by the reason.", ["finished_reason"]
        )
        self.finished = {reason: self.success.at(reason.value) for reason in FinishReason}
        self.rejected = families.counter(
            "admission_rejections",
            "Requests refused because too many are queued, by vLLM's name of the limit.",
            ["reason"],
        ).at("max_num_queued_reqs")
        self._http = families.counter(
            "http_requests",
            "HTTP requests answered, by route, method and status (499: the client had gone).",
            ["route", "method", "status"],
            is_of_model=False,
        )

    def http_answered(self, route: str, method: str, status: int) -> None:
        """Count one HTTP request. `route` is the pattern of a route, because the number of paths has no bound."""
        self._http.at(route, method, str(status)).add()

    def begin(self, *, arrival: float, num_prompt_tokens: int, n: int, max_tokens: int | None) -> RequestTimer:
        """Record a request that was sent to an engine and return its timer. `arrival` is a time of
        `time.perf_counter`."""
        self.prompt_tokens.observe(num_prompt_tokens)
        self.params_n.observe(n)
        if max_tokens is not None:
            # Bounded: a sum must not lose its precision to one request that asks for 2**60 tokens.
            self.params_max_tokens.observe(min(max_tokens, TOKENS[-1]))
        return RequestTimer(self, arrival, n)


class RequestTimer:
    """Measures one request with its `n` completions.

    The caller reports tokens as they arrive, or else only the first one and the finish of each completion.
    """

    def __init__(self, metrics: RequestMetrics, arrival: float, n: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first: float | None = None
        self._last = [0.0] * n
        self._num_tokens = [0] * n
        self._most_tokens = 0
        self._running = set(range(n))

    def first_token(self, at: float, engine: EngineId | None) -> None:
        """Record that the first token of any completion arrived at `at`, a time of `time.perf_counter`."""
        self._first = at
        label = "other" if engine is None or engine.rank >= MAX_ENGINE_LABELS else str(engine.rank)
        self._metrics.first_token.observe(self._first - self._arrival, label)

    def tokens(self, index: int, count: int, first_engine: EngineId | None) -> None:
        """Record that `count` more tokens of completion `index` arrived just now. `first_engine`: the engine that sent
        the first token of the request."""
        if count == 0:
            return
        now = time.perf_counter()
        if self._first is None:
            self.first_token(now, first_engine)
        if self._num_tokens[index]:
            # Tokens that come together share the time: the reader was slow, not the engine.
            self._metrics.between_tokens.observe((now - self._last[index]) / count)
        self._num_tokens[index] += count
        self._last[index] = now

    def finished(self, index: int, reason: FinishReason, num_tokens: int) -> None:
        """Record that completion `index` finished just now with `num_tokens` tokens in all. Called once per
        completion."""
        now = time.perf_counter()
        self._running.discard(index)
        self._most_tokens = max(self._most_tokens, num_tokens)
        if not self._running:
            self._metrics.max_generation_tokens.observe(self._most_tokens)
        self._metrics.finished[reason].add()
        self._metrics.generation_tokens.observe(num_tokens)
        self._metrics.latency.observe(now - self._arrival)
        if num_tokens > 1 and self._first is not None:
            self._metrics.per_token.observe((now - self._first) / (num_tokens - 1))

    def ended(self, reason: FinishReason) -> None:
        """Record that the request ended just now; completions that have not finished get this reason."""
        for index in sorted(self._running):
            self.finished(index, reason, self._num_tokens[index])
