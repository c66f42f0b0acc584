"""An engine without sockets on one device, whose steps a benchmark plans itself or leaves to the scheduler."""

from __future__ import annotations

import gc
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagleray.config.build import build_config
from eagleray.engine.startup import StartedEngine, start_engine
from eagleray.executor.executor import Executor, PendingStep
from eagleray.executor.in_process import InProcessGroup
from eagleray.identity import ClientId, EngineId
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import AdapterWritten, Call, NewRow, Reply, StepPlan, StepResult, WriteAdapter

BLOCK = 16
START_SECONDS = 300.0
MAX_NUM_SEQS = 256
CLIENT = ClientId("benchmark", 0)
GREEDY = Sampling(seed=0, temperature=0.0)
STEPS_AHEAD = 2
"""Steps in flight, as in an engine that plans the next step while the device computes one."""


class TimedGroup:
    """The worker in this process, and the seconds that it took for each kind of call."""

    def __init__(self, group: InProcessGroup) -> None:
        self._group = group
        self.topology = group.topology
        self.seconds: dict[str, float] = defaultdict(float)

    def send(self, call: Call) -> None:
        began = time.perf_counter()
        self._group.send(call)
        self.seconds[type(call.body).__name__] += time.perf_counter() - began

    def receive(self, timeout: float) -> Reply | None:
        return self._group.receive(timeout)

    def check(self) -> None:
        self._group.check()

    def close(self) -> None:
        self._group.close()


class BenchmarkEngine:
    """A model with random weights, its cache, and a worker in this process."""

    def __init__(self, checkpoint: Path, device: torch.device, **options: Any) -> None:
        if device.type == "cuda":  # else a kernel that does not compile would be replaced by plain torch
            options = {"attention_backend": "triton", **options}
        config = build_config(
            model=str(checkpoint),
            load_format="dummy",
            seed=0,
            device=device.type,
            executor="in-process",
            enable_prefix_caching=False,
            block_size=BLOCK,
            **{"max_num_seqs": MAX_NUM_SEQS, "log_level": "warning", **options},
        )
        self.device = device
        self._exit_stack = ExitStack()
        self._group = TimedGroup(InProcessGroup(EngineId("benchmark", 0), config))
        self.executor = Executor(self._group)
        self._exit_stack.callback(self.executor.close)
        try:
            started = start_engine(config, self.executor, deadline=time.monotonic() + START_SECONDS)
        except BaseException:
            self._exit_stack.close()
            raise
        self._started: StartedEngine | None = started
        self.num_blocks = started.info.num_kv_blocks
        self.vocab_size = started.info.vocab_size
        self.max_num_seqs = config.scheduling.max_num_seqs
        self.num_steps = 0

    def __enter__(self) -> BenchmarkEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker and return the device's memory."""
        self._exit_stack.close()
        self._started = None
        del self.executor, self._group
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds_of(self, *calls: str) -> float:
        """Return the seconds that the worker took for calls of these kinds, such as `LoadModel`."""
        return sum(self._group.seconds[name] for name in calls)

    def send(self, **fields: Any) -> PendingStep:
        """Begin a step. `fields`: those of `StepPlan` that are not empty."""
        self.num_steps += 1
        empty: dict[str, Any] = {"freed_rows": [], "new_rows": [], "new_blocks": []}
        return self.executor.step(StepPlan(step=self.num_steps, **empty | fields))

    def load_adapter(self, path: Path, num_slots: int) -> None:
        """Put an adapter into each of the first slots."""
        for slot in range(num_slots):
            (reply,) = self.executor.call(
                WriteAdapter(slot=slot, path=str(path)), AdapterWritten, timeout=START_SECONDS
            )
            if reply.failure is not None:
                raise RuntimeError(f"slot {slot} was not filled: {reply.failure.message}")

    def generate(self, *, num_requests: int, num_prompt: int, num_output: int, deadline: float) -> float:
        """Return the seconds in which the scheduler runs requests side by side. Raises `TimeoutError` when the
        monotonic clock passes `deadline`."""
        assert self._started is not None
        core = self._started.core
        random = np.random.default_rng(0)
        for index in range(num_requests):
            core.scheduler.add(
                Generate(
                    request_id=str(index),
                    client=CLIENT,
                    prompt_token_ids=random.integers(self.vocab_size, size=num_prompt).tolist(),
                    sampling=GREEDY,
                    stopping=Stopping(max_tokens=num_output),
                )
            )
        began = time.perf_counter()
        num_finished = num_tokens = 0
        while num_finished < num_requests:
            outputs = core.step(lambda chunks: None)
            for one in outputs.by_client.values():
                num_finished += sum(chunk.finish_reason is not None for chunk in one.chunks)
                num_tokens += len(one.tokens) + sum(len(chunk.token_ids) for chunk in one.chunks)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{num_tokens} tokens after {time.perf_counter() - began:.0f} s")
        assert num_tokens == num_requests * num_output, f"{num_tokens} tokens were generated"
        return time.perf_counter() - began


@dataclass
class SteadyDecodes:
    """Rows that each compute a token in every step. They begin with a context whose keys are zeros in the cache."""

    engine: BenchmarkEngine
    num_rows: int
    context: int
    max_steps: int
    sampling: Sampling = GREEDY
    is_traced: bool = False
    """Whether the routed experts of all rows are reported."""
    num_adapters: int = 0
    """Number of adapters that the rows have in turn."""
    host_seconds: list[float] = field(default_factory=list)
    """Seconds of the host for the beginning of each step."""
    last_result: StepResult | None = None
    _pending: deque[PendingStep] = field(default_factory=deque)

    def start(self) -> None:
        """Put the requests into rows and compute their first tokens."""
        blocks = -(-(self.context + self.max_steps + STEPS_AHEAD) // BLOCK)
        if self.num_rows * blocks > self.engine.num_blocks:
            raise RuntimeError(
                f"{self.num_rows} rows need {self.num_rows * blocks} blocks, the cache has {self.engine.num_blocks}"
            )
        random = np.random.default_rng(0)
        new_rows = [
            NewRow(
                row=row,
                request_id=str(row),
                token_ids=random.integers(self.engine.vocab_size, size=self.context).tolist(),
                num_prompt_tokens=self.context,
                num_computed_tokens=self.context - 1,
                block_ids=list(range(row * blocks, (row + 1) * blocks)),
                sampling=self.sampling,
                adapter_slot=row % self.num_adapters if self.num_adapters else -1,
            )
            for row in range(self.num_rows)
        ]
        freed = list(range(self.engine.max_num_seqs))
        self.engine.send(freed_rows=freed, new_rows=new_rows, **self._rows()).result()

    def run(self, num_steps: int) -> float:
        """Run some steps and return the seconds of one. The next step begins before the one before is finished."""
        began = time.perf_counter()
        for _ in range(num_steps):
            self._begin()
            if len(self._pending) == STEPS_AHEAD:
                self._finish()
        while self._pending:
            self._finish()
        return (time.perf_counter() - began) / num_steps

    def _begin(self) -> None:
        began = time.perf_counter()
        traced = {"capture_rows": list(range(self.num_rows))} if self.is_traced else {}
        self._pending.append(self.engine.send(**self._rows(), **traced))
        self.host_seconds.append(time.perf_counter() - began)

    def _finish(self) -> None:
        self.last_result = result = self._pending.popleft().result()
        if result.failures:
            raise RuntimeError(f"row {result.failures[0].row} failed: {result.failures[0].message}")

    def _rows(self) -> dict[str, list[int]]:
        return {"rows": list(range(self.num_rows)), "num_tokens": [1] * self.num_rows}


def time_prompt(engine: BenchmarkEngine, num_tokens: int) -> float:
    """Return the seconds of a step that computes a whole prompt, from its plan to its token."""
    tokens = np.random.default_rng(engine.num_steps).integers(engine.vocab_size, size=num_tokens).tolist()
    row = NewRow(
        row=0,
        request_id="prompt",
        token_ids=tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_ids=list(range(-(-num_tokens // BLOCK))),
        sampling=GREEDY,
    )
    freed = list(range(engine.max_num_seqs))
    began = time.perf_counter()
    result = engine.send(freed_rows=freed, new_rows=[row], rows=[0], num_tokens=[num_tokens]).result()
    seconds = time.perf_counter() - began
    if result.failures:
        raise RuntimeError(f"the prompt failed: {result.failures[0].message}")
    return seconds


def busy_seconds(run: Callable[[], object], gap_seconds: float) -> tuple[float, float, float]:
    """Profile `run` and return three sums of seconds on the GPU: with a kernel or a copy, without one in gaps longer
    than `gap_seconds`, and without one in shorter gaps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sum_of_spans(spans, gap_seconds)


def sum_of_spans(spans: list[tuple[float, float]], gap_seconds: float) -> tuple[float, float, float]:
    """Return the seconds within the spans, in the gaps between them that are longer than `gap_seconds`, and in the
    shorter ones."""
    busy = long_gaps = short_gaps = 0.0
    reached: float | None = None
    for begin, end in sorted(spans):
        if reached is not None and begin > reached:
            gap = begin - reached
            long_gaps, short_gaps = (
                (long_gaps + gap, short_gaps) if gap > gap_seconds else (long_gaps, short_gaps + gap)
            )
        busy += max(0.0, end - (begin if reached is None else max(begin, reached)))
        reached = end if reached is None else max(reached, end)
    return busy, long_gaps, short_gaps
