"""Limits of a device, measured in the same run as the figures that are compared with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from gpu_floors import DeviceRates
from gpu_timing import host_seconds_per_call, synchronize, time_calls
from torch import Tensor

READ_BLOCK = 4096
"""Numbers of four bytes that a program reads: 16 KB."""


@dataclass(frozen=True)
class DeviceLimits:
    read_bytes: float
    """Bytes read per second."""
    copy_bytes: float
    """Bytes read and written per second by a copy."""
    products: float
    """bfloat16 operations per second of a square product of random numbers."""
    graph_kernel: float
    """Seconds of an empty kernel in a CUDA graph."""
    triton_launch: float
    """Seconds of the host for the launch of an empty Triton kernel."""
    torch_launch: float
    """Seconds of the host for the launch of an addition by torch."""
    graph_launch: float
    """Seconds of the host for the launch of a graph of 200 empty kernels."""
    event_wait: float
    """Seconds from the launch of an empty kernel until the host has seen the event behind it."""
    upload: float
    """Seconds of the host for the launch of a copy of 64 KiB from pinned memory."""

    @property
    def rates(self) -> DeviceRates:
        return DeviceRates(read=self.read_bytes, products=self.products)

    def as_fields(self) -> dict[str, float]:
        """Return the limits in the units of the report."""
        scales = {"read_bytes": ("read_tb_s", 1e-12), "copy_bytes": ("copy_tb_s", 1e-12)}
        scales["products"] = ("product_tflop_s", 1e-12)
        fields = {}
        for name, value in asdict(self).items():
            label, scale = scales.get(name, (f"{name}_us", 1e6))
            fields[label] = value * scale
        return fields


@triton.jit
def _read_kernel(numbers, sums, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    read = tl.load(numbers + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + block, tl.sum(read, axis=0))


@triton.jit
def _empty_kernel(numbers):
    return


def measure_limits(device: torch.device, *, is_small: bool = False) -> DeviceLimits:
    """Measure on `device`. `is_small`: a trial with tiny sizes, on a CPU."""
    num_bytes, size, num_launches = (1 << 16, 64, 2) if is_small else (4 << 30, 8192, 2000)
    read, copy = _memory_rates(num_bytes, device)
    products = 2 * size**3 / _product_seconds(size, device)

    one = torch.zeros(1, device=device)
    launch: Callable[[], object] = lambda: _empty_kernel[(1,)](one)  # noqa: E731
    return DeviceLimits(
        read_bytes=read,
        copy_bytes=copy,
        products=products,
        graph_kernel=time_calls([launch], device).seconds,
        triton_launch=host_seconds_per_call(launch, device, num_calls=num_launches // 2),
        torch_launch=host_seconds_per_call(lambda: one.add_(1.0), device, num_calls=num_launches // 2),
        graph_launch=_graph_launch_seconds(launch, device),
        event_wait=_event_wait_seconds(launch, device, num_waits=num_launches),
        upload=_upload_seconds(device, num_launches // 10 or 1),
    )


def _memory_rates(num_bytes: int, device: torch.device) -> tuple[float, float]:
    """Return the bytes per second that are read, and that are read and written by a copy."""
    numbers = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(numbers)
    read_seconds = min(_read_seconds(numbers, device), time_calls([numbers.sum], device).seconds)
    return num_bytes / read_seconds, 2 * num_bytes / time_calls([lambda: target.copy_(numbers)], device).seconds


def _read_seconds(numbers: Tensor, device: torch.device) -> float:
    num_blocks = len(numbers) // READ_BLOCK
    sums = torch.empty(num_blocks, dtype=torch.int32, device=device)
    return time_calls(
        [lambda: _read_kernel[(num_blocks,)](numbers, sums, BLOCK=READ_BLOCK, num_warps=8)], device
    ).seconds


def _product_seconds(size: int, device: torch.device) -> float:
    # the clock of a GPU falls with the number of bits that change, so zeros would be faster than any real product
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=torch.bfloat16)
    return time_calls([lambda: torch.mm(a, b, out=out)] * 20, device).seconds


def _graph_launch_seconds(launch: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            launch()
    return host_seconds_per_call(graph.replay, device, num_calls=50)


def _event_wait_seconds(launch: Callable[[], object], device: torch.device, *, num_waits: int) -> float:
    if device.type != "cuda":
        return 0.0
    event = torch.cuda.Event()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(num_waits):
        launch()
        event.record()
        event.synchronize()
    return (time.perf_counter() - began) / num_waits


def _upload_seconds(device: torch.device, num_calls: int) -> float:
    if device.type != "cuda":
        return 0.0
    source = torch.zeros(1 << 16, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return host_seconds_per_call(lambda: target.copy_(source, non_blocking=True), device, num_calls=num_calls)
