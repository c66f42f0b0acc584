"""Figures of a server under load, computed from the outcomes of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from eagleray_bench.figures import Summary, summarize
from eagleray_bench.load import CompletedRequest, FailedRequest, LoadResult
from eagleray_bench.plot import Panel
from eagleray_bench.report import facts, summaries
from eagleray_bench.workload import BenchRequest

BUSY_CLIENT = 0.7


class FailureSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Failed requests of one kind."""

    kind: str
    count: int
    example: str
    """Cause of the first of them."""


class ServingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the requests that completed; failed ones count in `failures` only. Times are in milliseconds."""

    num_completed: int
    failures: list[FailureSummary]
    num_short: int
    """Completed requests with fewer tokens than requested."""
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    are_tokens_counted: bool
    """Whether the server counted tokens. If not, output tokens are events, and input tokens those of the requests."""
    ttft_ms: Summary | None
    """Time to first token: from the request to the first event with tokens."""
    tpot_ms: Summary | None
    """Time per output token after the first; one figure per request."""
    itl_ms: Summary | None
    """Inter-token latency: time between an event with tokens and the next one."""
    e2e_ms: Summary | None
    """Time from the request to the end of its answer."""
    peak_concurrency: int
    client_cpu_share: float
    """Processor time of the load generator as a share of one core."""
    late_ms: Summary | None
    """Delay with which requests were sent after their time."""


def serving_figures(load: LoadResult, requests: Sequence[BenchRequest]) -> ServingFigures:
    """Compute the figures of `load`, whose outcomes belong to `requests` in this order."""
    done = [
        (outcome, request)
        for outcome, request in zip(load.outcomes, requests, strict=True)
        if isinstance(outcome, CompletedRequest)
    ]
    answers = [answer for answer, _ in done]
    outputs = [_num_output(answer) for answer in answers]
    num_input = sum(
        len(request.prompt) if answer.num_prompt_tokens is None else answer.num_prompt_tokens
        for answer, request in done
    )
    return ServingFigures(
        num_completed=len(answers),
        failures=_failures(load),
        num_short=sum(_num_output(answer) < request.num_output for answer, request in done),
        duration_s=load.duration,
        requests_per_s=len(answers) / load.duration,
        output_tokens_per_s=sum(outputs) / load.duration,
        total_tokens_per_s=(num_input + sum(outputs)) / load.duration,
        num_input_tokens=num_input,
        num_cached_tokens=sum(answer.num_cached_tokens for answer in answers),
        num_output_tokens=sum(outputs),
        are_tokens_counted=all(answer.num_output_tokens is not None for answer in answers),
        ttft_ms=summarize(_ttft(answers), scale=1e3),
        tpot_ms=summarize(_tpot(answers), scale=1e3),
        itl_ms=summarize(_itl(answers), scale=1e3),
        e2e_ms=summarize(_e2e(answers), scale=1e3),
        peak_concurrency=load.peak_concurrency,
        client_cpu_share=load.cpu_share,
        late_ms=summarize(load.lateness, scale=1e3),
    )


def describe(figures: ServingFigures) -> str:
    """Return the figures as lines of text."""
    num_failed = sum(failure.count for failure in figures.failures)
    counted = "" if figures.are_tokens_counted else " (the server counts none: these are events)"
    cached = f", {figures.num_cached_tokens:,} of them from the prefix cache" if figures.num_cached_tokens else ""
    lines = {"requests": f"{figures.num_completed} completed, {num_failed} failed"}
    for failure in figures.failures:
        lines[f"  {failure.kind}"] = f"{failure.count} failed, the first one: {failure.example}"
    if figures.num_short:
        lines["  short"] = f"{figures.num_short} answers have fewer tokens than were asked for"
    lines |= {
        "duration": f"{figures.duration_s:.2f} s, at most {figures.peak_concurrency} requests at once",
        "requests/s": f"{figures.requests_per_s:.2f}",
        "output tokens/s": f"{figures.output_tokens_per_s:,.1f}",
        "all tokens/s": f"{figures.total_tokens_per_s:,.1f}",
        "input tokens": f"{figures.num_input_tokens:,}{cached}",
        "output tokens": f"{figures.num_output_tokens:,}{counted}",
        "this client": f"{figures.client_cpu_share:.0%} of a core",
    }
    if figures.client_cpu_share > BUSY_CLIENT:
        lines["this client"] += ": it may be the bottleneck, and the figures its own"
    times = {
        "time to first token": figures.ttft_ms,
        "time per output token": figures.tpot_ms,
        "inter-token latency": figures.itl_ms,
        "end to end": figures.e2e_ms,
    }
    return f"{facts(lines)}\n\n{summaries('ms', times)}"


def panels(load: LoadResult) -> list[Panel]:
    """Return the distributions to plot."""
    answers = [outcome for outcome in load.outcomes if isinstance(outcome, CompletedRequest)]
    return [
        Panel("time to first token", "ms", [1e3 * value for value in _ttft(answers)]),
        Panel("inter-token latency", "ms", [1e3 * value for value in _itl(answers)]),
        Panel("end to end", "ms", [1e3 * value for value in _e2e(answers)]),
    ]


def _failures(load: LoadResult) -> list[FailureSummary]:
    failed = [outcome for outcome in load.outcomes if isinstance(outcome, FailedRequest)]
    first = {failure.kind: failure.cause for failure in reversed(failed)}
    counts = Counter(failure.kind for failure in failed)
    return [FailureSummary(kind=kind, count=count, example=first[kind]) for kind, count in counts.most_common()]


def _num_output(answer: CompletedRequest) -> int:
    return len(answer.token_times) if answer.num_output_tokens is None else answer.num_output_tokens


def _ttft(answers: Sequence[CompletedRequest]) -> list[float]:
    return [answer.token_times[0] - answer.sent for answer in answers]


def _tpot(answers: Sequence[CompletedRequest]) -> list[float]:
    return [
        (answer.token_times[-1] - answer.token_times[0]) / (num_output - 1)
        for answer in answers
        if (num_output := _num_output(answer)) > 1
    ]


def _itl(answers: Sequence[CompletedRequest]) -> list[float]:
    gaps: list[float] = []
    for answer in answers:
        gaps += np.diff(answer.token_times).tolist()
    return gaps


def _e2e(answers: Sequence[CompletedRequest]) -> list[float]:
    return [answer.ended - answer.sent for answer in answers]
