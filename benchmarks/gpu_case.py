"""A kernel at one shape, ready to run, to be compared with its reference and to be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_floors import Work
from torch import Tensor

HALF_TOLERANCE = 1e-2
"""Relative error of results in bfloat16, whose numbers have a relative distance of 2 ** -8."""
EXACT = 0.0
POISON = 77
"""Content of integer results before the launch."""


@dataclass(frozen=True)
class KernelRun:
    """Memory of a kernel and a function that launches it."""

    launch: Callable[[], object]
    results: Callable[[], list[Tensor]]
    """Tensors that the launch has written."""
    expected: Callable[[], list[Tensor]]
    """The expected tensors, in float32 from the inputs. Called before the launch, which may change its inputs."""
    work: Work
    tolerance: float = HALF_TOLERANCE
    """Highest relative error."""
    is_poisoned: bool = True
    """Whether the results may be overwritten before the launch, as it reads none of them."""
    yardstick: Callable[[], Callable[[], object]] | None = None
    """Returns a call of another library that has the same results. Raises `ImportError` without that library."""


@dataclass(frozen=True)
class KernelCase:
    """A kernel and its shape. `make` takes a device and the shape's numbers."""

    kernel: str
    shape: str
    make: Callable[..., KernelRun]
    sizes: Mapping[str, Any]
    small: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of a trial that Triton's interpreter can run, in place of the real ones."""

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.shape}"

    def prepare(self, device: torch.device, *, is_small: bool) -> KernelRun:
        """Allocate the memory and draw the inputs. bfloat16 is float32 on a CPU, where it cannot be interpreted."""
        sizes = {**self.sizes, **(self.small if is_small else {})}
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return self.make(device, dtype, **sizes)


def relative_error(run: KernelRun) -> float:
    """Launch the kernel once and return its largest relative error over all results, as length of the difference by
    length of the expected vector."""
    expected = run.expected()
    for result in run.results() if run.is_poisoned else []:
        result.fill_(float("nan") if result.is_floating_point() else POISON)
    run.launch()
    errors = [_distance(found, wanted) for found, wanted in zip(run.results(), expected, strict=True)]
    return max(errors)


def _distance(found: Tensor, expected: Tensor) -> float:
    difference = found.double() - expected.double()
    length = max(expected.double().norm().item(), 1e-30)
    distance = difference.norm().item() / length
    return distance if distance == distance else float("inf")


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)
