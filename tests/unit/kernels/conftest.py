"""The compiled kernels that the modules of this folder test."""

from __future__ import annotations

import ctypes
import platform

import pytest
import torch

from eagleray.kernels.cpu.build.library import compiled_library, native_library
from eagleray.kernels.cpu.build.variants import VARIANTS, Variant, best_variant


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """The kernels for this processor."""
    return native_library()


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def other_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernels for a processor with fewer instructions. All modules use the same library, compiled once and kept."""
    return variant_library(request.param)


def variant_library(variant: Variant) -> ctypes.CDLL:
    """Return the kernels of a variant. Skip the test if this processor cannot run them, and for the best one, because
    the kernels that are compiled for this processor have the same instructions."""
    machine, capabilities = platform.machine(), torch.cpu.get_capabilities()
    if variant.architecture != machine or variant.lacking(capabilities):
        pytest.skip(f"this processor does not run {variant.name}")
    if variant == best_variant(machine, capabilities):
        pytest.skip(f"{variant.name} has the instructions of this processor")
    return compiled_library(variant)
