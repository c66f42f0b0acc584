"""Facts about torch, the kernels, the memory and the GPUs that a worker here would use, as JSON on standard output.

A process of its own (`python -m eagleray.worker.device_report`), started by `eagleray collect-env`, which imports no
torch and can report when this process crashes.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch

from eagleray.errors import ConfigError, EagleRayError
from eagleray.kernels.choose import Gpu, triton_lack
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.build.openmp import NativeUnavailable, mapped_runtimes
from eagleray.process.host_memory import host_free_bytes
from eagleray.worker.device import cpu_quota
from eagleray.worker.memory import total_bytes


def describe_devices() -> dict[str, Any]:
    """Return the facts by section. Compiles the kernels if that has not been done, as the first engine would."""
    return {
        "torch": {
            "version": torch.__version__,
            "CUDA": torch.version.cuda or "built without",
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "limit of the container": "none" if (quota := cpu_quota()) is None else f"{quota:g} cores",
            "OpenMP runtime": _openmp(),
        },
        "kernels": {"CPU": _cpu_kernels()} | ({"GPU": _gpu_kernels()} if torch.cuda.is_available() else {}),
        "memory": {"total": _gib(total_bytes(torch.device("cpu"))), "available": _gib(host_free_bytes())},
        "GPUs": {str(index): _describe_gpu(index) for index in range(torch.cuda.device_count())},
    }


def _openmp() -> str:
    try:
        return ", ".join(map(str, sorted(mapped_runtimes()))) or "none"
    except EagleRayError as error:
        return f"not usable: {error}"


def _cpu_kernels() -> str:
    try:
        return f"in use: {native_library()._name}"
    except NativeUnavailable as error:
        return f"not in use, plain torch computes: {error}"
    except ConfigError as error:
        return f"not in use, engines do not start: {error}"


def _gpu_kernels() -> str:
    lack = triton_lack(Gpu.of(torch.device("cuda")))
    return f"not in use, plain torch computes: {lack}" if lack else "in use: Triton's"


def _describe_gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {_gib(properties.total_memory)}, capability {properties.major}.{properties.minor}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the compilation of kernels takes seconds
    print(json.dumps(describe_devices()))
