"""The numbers that the kernels for this processor multiply with."""

from __future__ import annotations

import platform

from torch import Tensor

from eagleray.config.environment import build_settings
from eagleray.kernels.cpu.build.processor import processor_capabilities
from eagleray.kernels.cpu.build.variants import best_variant


def has_matrix_instructions() -> bool:
    """Whether the kernels that this process uses compute products by matrix instructions."""
    best = best_variant(platform.machine(), processor_capabilities())
    wanted = build_settings().kernels
    return best is not None and best.name == "amx" and wanted in (None, "native", "amx")


def multiplied_numbers(numbers: Tensor) -> Tensor:
    """Return the numbers of a weight of few bits as products use them: matrix instructions take bfloat16."""
    return numbers.float().bfloat16().to(numbers.dtype) if has_matrix_instructions() else numbers
