"""Times of scaling under running streams: an engine joins, and an engine leaves.

python benchmarks/scaling.py [CHECKPOINT] [--rounds 5] [--streams 4] [--options JSON]

Streams run on one engine. In each round a second engine is added; the streams are started anew, so that both engines
have some, and the engine of rank 0 is removed. The table has the seconds of both operations as `scale` reports them,
and the longest gap between two tokens of each stream while the engine left. Without a checkpoint it is the embedded
demo model. `--options`: further options of `AsyncLLM`, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from itertools import pairwise
from pathlib import Path

import eagleray
from eagleray import AsyncLLM, SamplingParams

DEMO_MODEL = Path(eagleray.__file__).parent / "demo_model"
WARM_SECONDS = 2.0
"""Time that streams run before an engine leaves."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(DEMO_MODEL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--options", type=json.loads, default={})
    asyncio.run(measure(parser.parse_args()))


async def measure(arguments: argparse.Namespace) -> None:
    options = {"num_threads": 1, "max_model_len": 2048, "log_level": "warning"} | arguments.options
    llm = AsyncLLM(arguments.checkpoint, **options)
    try:
        joined, left, gaps = [], [], []
        for _ in range(arguments.rounds):
            async with RunningStreams(llm, arguments.streams) as times:
                joined.append((await llm.scale(data_parallel_size=2))["seconds"])
            async with RunningStreams(llm, arguments.streams) as times:
                await asyncio.sleep(WARM_SECONDS)
                began = time.perf_counter()
                left.append((await llm.scale(remove_ranks=[0]))["seconds"])
                await asyncio.sleep(WARM_SECONDS)
            gaps += [longest_gap(each, began) for each in times]
    finally:
        llm.shutdown()
    print("| what | median | highest |")
    print("|---|---|---|")
    for what, unit, figures in (
        ("an engine joins", "s", joined),
        ("an engine with streams leaves", "s", left),
        ("longest gap of a stream meanwhile", "s", gaps or [math.nan]),
    ):
        print(f"| {what} | {statistics.median(figures):.3f} {unit} | {max(figures):.3f} {unit} |")


class RunningStreams:
    """A context in which streams run. Yields the times of the tokens of each."""

    def __init__(self, llm: AsyncLLM, count: int) -> None:
        self._llm = llm
        self._times: list[list[float]] = [[] for _ in range(count)]

    async def __aenter__(self) -> list[list[float]]:
        self._tasks = [asyncio.create_task(self._run(times, index)) for index, times in enumerate(self._times)]
        while not all(self._times):
            await asyncio.sleep(0.01)
        return self._times

    async def _run(self, times: list[float], index: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True, detokenize=False)
        while True:
            async for _ in self._llm.generate({"prompt_token_ids": [10 + index] * 16}, params):
                times.append(time.perf_counter())

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def longest_gap(times: list[float], begin: float) -> float:
    """Return the seconds of the longest gap between two tokens that ends after `begin`."""
    return max(after - before for before, after in pairwise(times) if after > begin)


if __name__ == "__main__":
    main()
