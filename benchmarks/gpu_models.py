"""Models of published shapes with random weights: the rows of the table of targets.

The steps of a figure are planned here and computed by a worker as an engine's are; the throughput is that of a whole
engine in this process. Keys and values before a row's first step are zeros, which costs the same as any others.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_adapters import write_adapter
from gpu_engine import BenchmarkEngine, SteadyDecodes, busy_seconds, time_prompt
from gpu_floors import DeviceRates, RowWork, WeightBytes, decode_rows, step_work, throughput_seconds
from gpu_limits import DeviceLimits
from gpu_record import GpuRecord, Section, describe
from gpu_shapes import write_config
from gpu_targets import TARGETS, GpuTarget

from eagleray.messages.steps import StepResult
from eagleray.models.config_file import ConfigFile
from eagleray.models.registry import find_family
from eagleray.models.spec import ModelSpec

HOST_GAP_SECONDS = 5e-6
"""Time without a kernel that counts as idleness. Between the kernels of a graph it is about one microsecond."""

NUM_ADAPTERS, ADAPTER_RANK = 8, 16

BY_KEY = {target.key: target for target in TARGETS}


@dataclass(frozen=True)
class RunSizes:
    """Numbers of a real run, or of a trial on a CPU."""

    is_small: bool = False

    @property
    def context(self) -> int:
        return 20 if self.is_small else 1024

    @property
    def prompt(self) -> int:
        return 40 if self.is_small else 8192

    @property
    def throughput(self) -> tuple[int, int, int]:
        """Requests, tokens in, tokens out."""
        return (4, 10, 5) if self.is_small else (256, 1000, 1000)

    @property
    def num_steps(self) -> int:
        return 3 if self.is_small else 50

    @property
    def rounds(self) -> int:
        return 2 if self.is_small else 3

    def rows(self, num_rows: int) -> int:
        return min(num_rows, 4) if self.is_small else num_rows

    @property
    def max_steps(self) -> int:
        """Most steps that a row of a figure takes."""
        return 12 * self.num_steps


@dataclass
class ModelRun:
    """State that the measurements of all models share."""

    record: GpuRecord
    limits: DeviceLimits
    device: torch.device
    directory: Path
    sizes: RunSizes = field(default_factory=RunSizes)

    @property
    def rates(self) -> DeviceRates:
        return self.limits.rates

    def checkpoint(self, shape: str) -> Path:
        return write_config(self.directory, shape, is_small=self.sizes.is_small)

    def spec(self, shape: str) -> ModelSpec:
        config = ConfigFile.read(self.checkpoint(shape))
        return find_family(config).read_spec(config)

    @contextmanager
    def engine(self, section: Section, shape: str, keys: list[str], **options: Any) -> Any:
        """Open an engine, and note its times in the table of steps. If it cannot be opened, all rows `keys` fail, and
        None is given."""
        if self.sizes.is_small:
            options = {"num_kv_blocks": 400, "max_num_seqs": 8, "max_model_len": 1000, "num_threads": 1} | options
        try:
            engine = BenchmarkEngine(self.checkpoint(shape), self.device, **options)
        except Exception as error:
            reason = describe(error)
            for key in keys:
                section.attempt(self.record.targets, BY_KEY[key].name, lambda: _fail(f"no engine: {reason}"))
            yield None
            return
        with engine:
            figures = {
                "load_s": engine.seconds_of("LoadModel"),
                "memory_s": engine.seconds_of("MeasureMemory"),
                "capture_s": engine.seconds_of("AllocateCache"),
                "cache_blocks": engine.num_blocks,
            }
            self.record.steps.append({"name": f"{shape}, start", "note": _listed(options), **figures})
            yield engine

    def judge(self, section: Section, key: str, measure: Callable[[], tuple[float, str]]) -> None:
        """Measure the value of a target, with a text that explains it, and judge it."""
        target = BY_KEY[key]

        def judged() -> dict[str, Any]:
            value, note = measure()
            return _judged(target, value) | {"note": note}

        section.attempt(self.record.targets, target.name, judged)

    def decodes(
        self,
        section: Section,
        name: str,
        engine: BenchmarkEngine,
        spec: ModelSpec,
        num_rows: int,
        *,
        is_fp8: bool = False,
    ) -> dict[str, Any]:
        """Measure steady steps, and append the figures to the table of steps. Errors of the measurement are raised."""
        figures = self.record.steps

        def measure() -> dict[str, Any]:
            decodes = SteadyDecodes(engine, self.sizes.rows(num_rows), self.sizes.context, self.sizes.max_steps)
            decodes.start()
            decodes.run(self.sizes.num_steps)
            decodes.host_seconds.clear()
            seconds = statistics.median(decodes.run(self.sizes.num_steps) for _ in range(self.sizes.rounds))
            used = None if spec.moe is None else self._used_experts(decodes)
            context = self.sizes.context + (1 + self.sizes.rounds) * self.sizes.num_steps // 2
            rows = decode_rows(decodes.num_rows, context)
            weights = WeightBytes.of(spec, is_fp8=is_fp8)
            floor = step_work(spec, rows, weights=weights, num_used_experts=used).seconds(self.rates)
            return {
                "ms": seconds * 1e3,
                "floor_ms": floor * 1e3,
                "share": floor / seconds,
                "tokens_s": decodes.num_rows / seconds,
                "host_us": statistics.median(decodes.host_seconds) * 1e6,
                "used_experts": used,
            }

        if not section.attempt(figures, name, measure):
            raise RuntimeError(figures[-1]["failure"])
        return figures[-1]

    def _used_experts(self, decodes: SteadyDecodes) -> float | None:
        """Return the average number of experts of a layer that have a token, if the engine reports routed experts."""
        decodes.is_traced = True
        try:
            decodes.run(1)
        finally:
            decodes.is_traced = False
        return None if decodes.last_result is None else count_used_experts(decodes.last_result)


def count_used_experts(result: StepResult) -> float:
    """Return the experts that have a token, on average over the layers, of a step whose rows are all traced."""
    assert result.routed_experts is not None
    chosen = np.asarray(result.routed_experts)  # [tokens, layers, top_k]
    return float(np.mean([len(np.unique(chosen[:, layer])) for layer in range(chosen.shape[1])]))


def measure_8b(run: ModelRun, section: Section) -> None:
    shape = "qwen3-8b"
    spec = run.spec(shape)
    seconds_of_one: list[float] = []
    with run.engine(section, shape, ["8b-1", "8b-32", "8b-prompt", "idle-1", "idle-32", "idle-256"]) as engine:
        if engine is not None:
            for num_rows in (1, 32):
                run.judge(section, f"8b-{num_rows}", lambda n=num_rows: _share(run, section, shape, engine, spec, n))
            measured = [figures for figures in run.record.steps if "ms" in figures]
            seconds_of_one = [figures["ms"] / 1e3 for figures in measured if figures["name"] == _name(shape, 1)]
            with contextlib.suppress(RuntimeError):  # it is in the table of steps
                run.decodes(section, _name(shape, 256), engine, spec, 256)
            run.judge(section, "8b-prompt", lambda: _prompt(run, engine, spec))
            for num_rows in (1, 32, 256):
                run.judge(section, f"idle-{num_rows}", lambda n=num_rows: _idle(run, engine, n))
    with run.engine(section, shape, ["8b-fp8"], quantization="fp8") as engine:
        if engine is not None:
            run.judge(section, "8b-fp8", lambda: _fp8(run, section, shape, engine, spec, seconds_of_one))
    with run.engine(section, shape, ["capture", "8b-throughput"]) as engine:
        if engine is not None:
            # the first engine has compiled all kernels; the throughput comes last, as it may use up the time
            run.judge(section, "capture", lambda: _capture(engine))
            run.judge(section, "8b-throughput", lambda: _throughput(run, section, engine, spec))


def measure_30b(run: ModelRun, section: Section) -> None:
    shape = "qwen3-30b-a3b"
    spec = run.spec(shape)
    with run.engine(section, shape, ["30b-1", "30b-32", "routed"], enable_return_routed_experts=True) as engine:
        if engine is not None:
            for num_rows in (1, 32):
                run.judge(section, f"30b-{num_rows}", lambda n=num_rows: _share(run, section, shape, engine, spec, n))
            run.judge(section, "routed", lambda: _routed(run, engine))


def measure_gpt_oss(run: ModelRun, section: Section) -> None:
    shape = "gpt-oss-20b"
    spec = run.spec(shape)
    with run.engine(section, shape, ["gpt-oss-1"], enable_return_routed_experts=True) as engine:
        if engine is not None:
            run.judge(section, "gpt-oss-1", lambda: _share(run, section, shape, engine, spec, 1))


def measure_small(run: ModelRun, section: Section) -> None:
    shape = "qwen3-0.6b"
    spec = run.spec(shape)
    plain: dict[int, float] = {}
    with run.engine(section, shape, ["0.6b-1"]) as engine:
        if engine is not None:

            def milliseconds() -> tuple[float, str]:
                figures = run.decodes(section, _name(shape, 1), engine, spec, 1)
                return figures["ms"], f"floor {figures['floor_ms']:.2f} ms"

            run.judge(section, "0.6b-1", milliseconds)
            plain = _seconds_by_adapters(run, engine, [0])
    options = {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": ADAPTER_RANK}
    with run.engine(section, shape, ["lora-unused", "lora"], **options) as engine:
        if engine is not None:
            engine.load_adapter(write_adapter(run.directory / "adapter", spec, ADAPTER_RANK), NUM_ADAPTERS)
            adapted = _seconds_by_adapters(run, engine, [0, NUM_ADAPTERS])
            run.judge(section, "lora-unused", lambda: _ratio(plain.get(0), adapted[0]))
            run.judge(section, "lora", lambda: _ratio(adapted[0], adapted[NUM_ADAPTERS]))


def _share(
    run: ModelRun, section: Section, shape: str, engine: BenchmarkEngine, spec: ModelSpec, num_rows: int
) -> tuple[float, str]:
    figures = run.decodes(section, _name(shape, num_rows), engine, spec, num_rows)
    note = f"{figures['ms']:.2f} ms, floor {figures['floor_ms']:.2f} ms"
    if figures["used_experts"] is not None:
        note += f" with {figures['used_experts']:.0f} experts of a layer"
    return figures["share"], note


def _prompt(run: ModelRun, engine: BenchmarkEngine, spec: ModelSpec) -> tuple[float, str]:
    time_prompt(engine, run.sizes.prompt)
    seconds = statistics.median(time_prompt(engine, run.sizes.prompt) for _ in range(run.sizes.rounds))
    floor = step_work(spec, [RowWork(run.sizes.prompt, 0)]).seconds(run.rates)
    return floor / seconds, f"{seconds * 1e3:.0f} ms, floor {floor * 1e3:.0f} ms"


def _idle(run: ModelRun, engine: BenchmarkEngine, num_rows: int) -> tuple[float, str]:
    """Measure the part of the time in which the GPU has nothing to compute for longer than between two kernels. The
    profiler slows the host, so the real part is smaller."""
    if run.device.type != "cuda":
        raise RuntimeError("the profiler of a GPU is needed")
    decodes = SteadyDecodes(engine, run.sizes.rows(num_rows), run.sizes.context, run.sizes.max_steps)
    decodes.start()
    decodes.run(run.sizes.num_steps)
    num_steps = 20
    busy, long_gaps, short_gaps = busy_seconds(lambda: decodes.run(num_steps), HOST_GAP_SECONDS)
    total = busy + long_gaps + short_gaps
    if total == 0:
        raise RuntimeError("the profiler has seen no kernel")
    note = f"{busy / num_steps * 1e3:.2f} ms of kernels in a step, {100 * short_gaps / total:.1f} % between kernels"
    return long_gaps / total, note


def _capture(engine: BenchmarkEngine) -> tuple[float, str]:
    """Return the seconds in which the cache was allocated and all graphs were captured."""
    return engine.seconds_of(
        "AllocateCache"
    ), f"{engine.seconds_of('MeasureMemory'):.1f} s for the largest steps before"


def _throughput(run: ModelRun, section: Section, engine: BenchmarkEngine, spec: ModelSpec) -> tuple[float, str]:
    num_requests, num_prompt, num_output = run.sizes.throughput
    engine.generate(  # a few steps of each kind first
        num_requests=min(num_requests, 8), num_prompt=num_prompt // 2, num_output=4, deadline=section.deadline
    )
    seconds = engine.generate(
        num_requests=num_requests, num_prompt=num_prompt, num_output=num_output, deadline=section.deadline
    )
    floor = throughput_seconds(spec, run.rates, num_requests=num_requests, num_prompt=num_prompt, num_output=num_output)
    tokens = num_requests * num_output
    return floor / seconds, f"{tokens / seconds:.0f} tokens/s, limit {tokens / floor:.0f}"


def _fp8(
    run: ModelRun, section: Section, shape: str, engine: BenchmarkEngine, spec: ModelSpec, bf16: list[float]
) -> tuple[float, str]:
    figures = run.decodes(section, f"{_name(shape, 1)}, FP8", engine, spec, 1, is_fp8=True)
    if not bf16:
        raise RuntimeError("there is no time of bf16 to compare with")
    return figures["ms"] / 1e3 / bf16[0], f"{figures['ms']:.2f} ms, {100 * figures['share']:.0f} % of its own floor"


def _routed(run: ModelRun, engine: BenchmarkEngine) -> tuple[float, str]:
    decodes = SteadyDecodes(engine, run.sizes.rows(32), run.sizes.context, run.sizes.max_steps)
    decodes.start()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for is_traced in [False, True] * run.sizes.rounds:
        decodes.is_traced = is_traced
        decodes.run(run.sizes.num_steps // 2)
        seconds[is_traced].append(decodes.run(run.sizes.num_steps))
    off, on = (statistics.median(seconds[is_traced]) for is_traced in (False, True))
    return off / on, f"{off * 1e3:.2f} ms a step without, {on * 1e3:.2f} ms with"


def _seconds_by_adapters(run: ModelRun, engine: BenchmarkEngine, numbers: list[int]) -> dict[int, float]:
    """Return the seconds of a step of 32 rows by the number of adapters that they have, measured in turn."""
    seconds: dict[int, list[float]] = {number: [] for number in numbers}
    for number in numbers * run.sizes.rounds:
        rows, sizes = run.sizes.rows(32), run.sizes
        decodes = SteadyDecodes(engine, rows, sizes.context, sizes.max_steps, num_adapters=number)
        decodes.start()
        decodes.run(sizes.num_steps // 2)
        seconds[number].append(decodes.run(sizes.num_steps))
    return {number: statistics.median(measured) for number, measured in seconds.items()}


def _ratio(before: float | None, after: float) -> tuple[float, str]:
    if before is None:
        raise RuntimeError("there is no time to compare with")
    return before / after, f"{before * 1e3:.2f} ms a step before, {after * 1e3:.2f} ms after"


def _judged(target: GpuTarget, value: float) -> dict[str, Any]:
    return {
        "key": target.key,
        "value": value,
        "shown": target.show(value),
        "must": target.bound,
        "verdict": target.verdict(value),
    }


def _name(shape: str, num_rows: int) -> str:
    return f"{shape}, {num_rows} row{'s' if num_rows > 1 else ''}"


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _fail(reason: str) -> dict[str, Any]:
    raise RuntimeError(reason)
