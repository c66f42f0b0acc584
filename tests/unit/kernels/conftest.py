"""The compiled kernels that the modules of this folder test. Of a module, `declare` gives a library's functions their
types."""

from __future__ import annotations

import ctypes

import pytest
import torch

from eagleray.kernels.cpu.build.library import NATIVE, build, load, native_library

LEVELS = {"DEFAULT": ["x86-64"], "AVX2": ["x86-64", "x86-64-v3"], "AVX512": ["x86-64", "x86-64-v3", "x86-64-v4"]}


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """For this processor."""
    declared: ctypes.CDLL = request.module.declare(native_library())
    return declared


@pytest.fixture(scope="module", params=["x86-64-v4", "x86-64-v3", "x86-64"])
def other_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """For a processor that can do less. All modules use the same library, which is compiled once and kept."""
    if request.param not in LEVELS.get(torch.backends.cpu.get_cpu_capability(), []):
        pytest.skip(f"this machine is not {request.param}")
    declared: ctypes.CDLL = request.module.declare(load(build(sorted(NATIVE.glob("*.cpp")), march=request.param)))
    return declared
