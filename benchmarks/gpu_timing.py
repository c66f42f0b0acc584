"""Times of work on a device: repeated calls in a CUDA graph on a GPU, plain calls elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ROUNDS = 5
MAX_CALLS = 2000
MIN_ROUND_SECONDS = 0.005
"""A round has as many calls as take this long, so that the clock's resolution and the graph's launch do not count."""


@dataclass(frozen=True)
class TimedCalls:
    seconds: float
    """Seconds of one call: the median of some rounds."""
    is_captured: bool
    """Whether the calls ran as a CUDA graph, without the time of their launches."""
    problem: str = ""
    """The reason if no graph could be captured."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> TimedCalls:
    """Return the time of a call, on average over `calls`. Several calls that do the same on other memory keep a cache
    from holding what a real step would have to read."""
    for call in calls:  # compiles kernels
        call()
    synchronize(device)
    if device.type != "cuda":
        return TimedCalls(_host_seconds(calls) / len(calls), is_captured=False)
    single = _eager_seconds(calls, 1) / len(calls)
    turns = max(1, min(int(MIN_ROUND_SECONDS / single), MAX_CALLS) // len(calls))
    try:
        replay = _captured(calls, turns)
    except Exception as error:
        torch.cuda.synchronize(device)
        return TimedCalls(_eager_seconds(calls, turns) / (turns * len(calls)), False, _sentence(error))
    replay()
    seconds = statistics.median(_between_events(replay) for _ in range(ROUNDS))
    return TimedCalls(seconds / (turns * len(calls)), is_captured=True)


def host_seconds_per_call(call: Callable[[], object], device: torch.device, *, num_calls: int) -> float:
    """Return the seconds that the host needs for a call that does not wait for the device."""
    call()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    seconds = time.perf_counter() - began
    synchronize(device)
    return seconds / num_calls


def _captured(calls: Sequence[Callable[[], object]], turns: int) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in calls:
                call()
    return graph.replay


def _eager_seconds(calls: Sequence[Callable[[], object]], turns: int) -> float:
    def run() -> None:
        for _ in range(turns):
            for call in calls:
                call()

    return statistics.median(_between_events(run) for _ in range(3))


def _between_events(run: Callable[[], object]) -> float:
    """Return the seconds between the beginning and the end of what `run` launches."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def _host_seconds(calls: Sequence[Callable[[], object]]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - began


def _sentence(error: Exception) -> str:
    return f"not captured: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
