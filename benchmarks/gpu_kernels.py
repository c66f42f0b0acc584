"""Every Triton kernel at real shapes: its error, and its time beside the least time that the device allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gpu_adapter_cases import CASES as ADAPTER_CASES
from gpu_attention_cases import CASES as ATTENTION_CASES
from gpu_case import KernelCase, KernelRun, relative_error
from gpu_expert_cases import CASES as EXPERT_CASES
from gpu_limits import DeviceLimits
from gpu_row_cases import CASES as ROW_CASES
from gpu_timing import time_calls

CASES: list[KernelCase] = [*ATTENTION_CASES, *EXPERT_CASES, *ROW_CASES, *ADAPTER_CASES]

CACHED_BYTES = 50 << 20
"""Second-level cache of an H200. Copies of a kernel's memory that take twice that are used in turn."""
MAX_COPIES = 8


def measure_kernel(
    case: KernelCase, limits: DeviceLimits, device: torch.device, *, is_small: bool = False
) -> dict[str, Any]:
    """Return the figures of a kernel. Raises if it does not run or if its results are wrong."""
    torch.manual_seed(0)
    run = case.prepare(device, is_small=is_small)
    error = relative_error(run)
    if error > run.tolerance:
        raise AssertionError(f"the relative error is {error:.2g}, at most {run.tolerance:.2g} is expected")
    runs = [run, *_copies(case, run, device, is_small=is_small)]
    timed = time_calls([one.launch for one in runs], device)
    floor = max(run.work.seconds(limits.rates), limits.graph_kernel)
    figures = {
        "us": timed.seconds * 1e6,
        "floor_us": floor * 1e6,
        "share": floor / timed.seconds,
        "bound": _bound(run, limits),
        "error": error,
        "note": timed.problem,
    }
    if run.yardstick is not None:
        figures |= _yardstick(run, device)
    return figures


def _copies(case: KernelCase, run: KernelRun, device: torch.device, *, is_small: bool) -> Iterator[KernelRun]:
    if device.type != "cuda":
        return
    wanted = int(2 * CACHED_BYTES / max(run.work.num_bytes, 1)) + 1
    for _ in range(min(wanted, MAX_COPIES) - 1):
        yield case.prepare(device, is_small=is_small)


def _bound(run: KernelRun, limits: DeviceLimits) -> str:
    """Return the name of the limit that the floor comes from."""
    if run.work.seconds(limits.rates) < limits.graph_kernel:
        return "launch"
    is_read = run.work.num_bytes / limits.read_bytes >= run.work.operations / limits.products
    return "read" if is_read else "products"


def _yardstick(run: KernelRun, device: torch.device) -> dict[str, Any]:
    """Return the time of FlashInfer's kernel, or nothing without FlashInfer. Its failure does not matter here."""
    assert run.yardstick is not None
    try:
        return {"flashinfer_us": time_calls([run.yardstick()], device).seconds * 1e6}
    except ImportError:
        return {}
    except Exception as error:
        return {"note": f"FlashInfer failed: {type(error).__name__}: {str(error)[:200]}"}
