"""The compiled kernels that the modules of this folder test."""

from __future__ import annotations

import ctypes

import pytest
import torch

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.build.library import SOURCE_DIRECTORY, build, load, native_library

LEVELS = {"DEFAULT": ["x86-64"], "AVX2": ["x86-64", "x86-64-v3"], "AVX512": ["x86-64", "x86-64-v3", "x86-64-v4"]}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """The kernels for this processor."""
    return native_library()


@pytest.fixture(scope="module", params=["x86-64-v4", "x86-64-v3", "x86-64"])
def other_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernels for a processor with fewer instructions. All modules use the same library, compiled once and kept."""
    if request.param not in LEVELS.get(torch.backends.cpu.get_cpu_capability(), []):
        pytest.skip(f"this machine is not {request.param}")
    return abi.declare(load(build(sorted(SOURCE_DIRECTORY.glob("*.cpp")), march=request.param)))
