"""Figures of a machine with an NVIDIA GPU: limits of the device, kernels, and models with random weights.

    python benchmarks/gpu.py --json gpu.json                 everything, in less than six minutes
    python benchmarks/gpu.py --tests --json gpu.json         after the tests marked gpu, as `make gpu` does
    python benchmarks/gpu.py --only kernels --json gpu.json  one section
    python benchmarks/gpu.py --trial                         tiny sizes on a CPU, to try the benchmark itself

Needs neither Ray nor an installation: the folder of the repository is enough. Each measurement that fails is reported,
and the others go on. `scripts/gpu_report.py` turns the file into the tables of docs/gpu.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

if "--trial" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported

import torch  # noqa: E402
from gpu_kernels import CASES, measure_kernel  # noqa: E402
from gpu_limits import DeviceLimits, measure_limits  # noqa: E402
from gpu_machine import describe_machine, run_gpu_tests  # noqa: E402
from gpu_models import (  # noqa: E402
    ModelRun,
    RunSizes,
    measure_8b,
    measure_30b,
    measure_gpt_oss,
    measure_small,
)
from gpu_record import GpuRecord, Section  # noqa: E402
from gpu_tables import report_text, write_record  # noqa: E402

SECTIONS: dict[str, float] = {"kernels": 80, "8b": 120, "30b": 70, "0.6b": 40, "gpt-oss": 40}
"""Seconds of each section. A measurement that has begun is finished, so a section may take a little longer."""

MODELS: dict[str, Callable[[ModelRun, Section], None]] = {
    "8b": measure_8b,
    "30b": measure_30b,
    "0.6b": measure_small,
    "gpt-oss": measure_gpt_oss,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there, also after each section")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="(default: all)")
    parser.add_argument("--tests", action="store_true", help="run the tests marked gpu first")
    parser.add_argument("--trial", action="store_true", help="tiny sizes on a CPU: the figures mean nothing")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.trial else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --trial tries the benchmark on a CPU")
    record = GpuRecord(machine={"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), **describe_machine(ROOT)})
    if arguments.tests:
        _timed(record, arguments.json, "tests", lambda: record.tests.update(run_gpu_tests(ROOT)))
    limits = _limits(record, arguments.json, device)
    if limits is not None:
        _measure(record, arguments, limits, device)
    print(report_text(record))
    failures = record.failures()
    print(f"\n{len(failures)} failed" + "".join(f"\n  {line}" for line in failures))
    return 1 if failures else 0


def _limits(record: GpuRecord, file: Path | None, device: torch.device) -> DeviceLimits | None:
    found: list[DeviceLimits] = []

    def measure() -> dict[str, float]:
        found.append(measure_limits(device, is_small=device.type == "cpu"))
        record.limits.update(found[0].as_fields())
        return {}

    section = Section("limits", 60)
    _timed(record, file, "limits", lambda: section.attempt(record.steps, "limits", measure))
    if found:
        record.steps.pop()  # `limits` has the figures
    return found[0] if found else None


def _measure(record: GpuRecord, arguments: argparse.Namespace, limits: DeviceLimits, device: torch.device) -> None:
    sizes = RunSizes(is_small=device.type == "cpu")
    with tempfile.TemporaryDirectory() as directory:
        run = ModelRun(record, limits, device, Path(directory), sizes)
        for name in arguments.only:
            section = Section(name, SECTIONS[name])
            measure = MODELS.get(name, _measure_kernels)
            _timed(record, arguments.json, name, lambda m=measure, s=section: m(run, s))


def _measure_kernels(run: ModelRun, section: Section) -> None:
    for case in CASES:
        section.attempt(
            run.record.kernels,
            case.name,
            lambda case=case: measure_kernel(case, run.limits, run.device, is_small=run.sizes.is_small),
        )


def _timed(record: GpuRecord, file: Path | None, name: str, measure: Callable[[], object]) -> None:
    """Run a section, note its seconds, and write the file: a later crash leaves these figures."""
    print(f"{name} …", flush=True)
    began = time.monotonic()
    try:
        measure()
    except Exception as error:  # of the section itself: its measurements catch their own
        Section(name, 60).attempt(record.steps, name, lambda error=error: _raise(error))
    record.sections[name] = time.monotonic() - began
    _free_memory()
    if file is not None:
        write_record(record, file)


def _free_memory() -> None:
    """Return memory that torch keeps, which an engine that sizes its cache would take for used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _raise(error: Exception) -> dict[str, float]:
    raise error


if __name__ == "__main__":
    sys.exit(main())
